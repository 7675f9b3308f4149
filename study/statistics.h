#pragma once
// Statistics of paired runs: every setting is run with the same seeds, so a difference is taken seed by seed.

#include <cstdint>
#include <vector>

namespace study {

struct Summary {
  int64_t count = 0;
  double mean = 0;
  double deviation = 0;  // of the sample; NaN of fewer than two
};
Summary summarize(const std::vector<double>& values);

/// Distribution function of Student's t, and its inverse.
double student_cdf(double t, double degrees);
double student_quantile(double probability, double degrees);

/// A mean and its interval of Student's t at a level of 1 - alpha; NaN of fewer than two.
struct Interval {
  double mean = 0, low = 0, high = 0;
};
Interval interval_of(const std::vector<double>& values, double alpha = 0.05);

/// The mean of differences, and how sure one can be of it. NaN where there are too few.
struct Paired {
  int64_t count = 0;
  double mean = 0;
  double low = 0, high = 0;  // 95% interval of Student's t
  double simultaneous_low = 0,
         simultaneous_high = 0;  // the same for all of `comparisons` at once (Bonferroni)
  double p = 1;                  // two-sided, by flipping signs; never below 2^(1 - count)
};
Paired paired(const std::vector<double>& differences, int64_t comparisons);

/// Two-sided p-value of the mean being 0: the part of all flips of signs whose mean is at least as far away. All of
/// them up to 20 differences, a million drawn from a fixed seed beyond.
double sign_flip_p(const std::vector<double>& differences);

/// Holm's correction: p-values, each made so large that all that stay below α are right together with 1 - α.
std::vector<double> holm(const std::vector<double>& p);

}  // namespace study
