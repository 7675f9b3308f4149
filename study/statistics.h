#pragma once
// Statistics of paired runs. All settings run with the same seeds, so differences are taken seed by seed.

#include <cstdint>
#include <vector>

namespace study {

struct Summary {
  int64_t count = 0;
  double mean = 0;
  double deviation = 0;  // sample standard deviation; NaN for fewer than two values
};
Summary summarize(const std::vector<double>& values);

/// Distribution function of Student's t, and its inverse.
double student_cdf(double t, double degrees);
double student_quantile(double probability, double degrees);

/// A mean and its Student's t interval at level 1 - alpha. The interval is NaN for fewer than two values.
struct Interval {
  double mean = 0, low = 0, high = 0;
};
Interval interval_of(const std::vector<double>& values, double alpha = 0.05);

/// The mean of differences with intervals and a p-value, which are NaN for fewer than two differences.
struct Paired {
  int64_t count = 0;
  double mean = 0;
  double low = 0, high = 0;  // 95% Student's t interval
  double simultaneous_low = 0,
         simultaneous_high = 0;  // the same, valid for all `comparisons` at once (Bonferroni)
  double p = 1;                  // two-sided, by sign flips; never below 2^(1 - count)
};
Paired paired(const std::vector<double>& differences, int64_t comparisons);

/// Two-sided p-value for a mean of 0: the fraction of sign flips whose mean is at least as far from 0. Uses all flips
/// for up to 20 differences, else a million flips drawn from a fixed seed.
double sign_flip_p(const std::vector<double>& differences);

/// p-values with Holm's correction: with probability at least 1 - α no true null hypothesis gets a value below α.
std::vector<double> holm(const std::vector<double>& p);

}  // namespace study
