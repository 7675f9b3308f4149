#pragma once
// What the results of a study say: every setting against the baselines, the noise, and curves with bands.

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "study/results.h"
#include "study/statistics.h"

namespace study {

/// The two Full-QKV Muons, against which all is compared.
constexpr const char* kBaselines[] = {"packed", "three-way"};

/// Fewer seeds than these are exploratory: with 5, no p-value by flipping signs is below 0.05. So is what lacks seeds
/// whose runs failed: those that are left may be the lucky ones.
constexpr int64_t kEnoughSeeds = 6;

enum class Mark { kUndecided, kBetter, kWorse };
std::string to_string(Mark mark);

/// Better or worse only if the interval that holds for all comparisons at once says so.
Mark mark_of(const Paired& difference);

/// A setting against a baseline. The exploratory ones are a family of comparisons, the others another.
struct BaselineComparison {
  Paired difference;  // loss less the baseline's, seed by seed
  bool exploratory = true;
  int64_t family = 0;      // how many comparisons there are in its own
  double holm = kUnknown;  // p-value, corrected for the comparisons of its family
  Mark mark = Mark::kUndecided;
};

/// Mean over seeds at every step, and the 95% interval of it.
struct Band {
  int64_t count = 0;
  std::vector<int64_t> steps;
  std::vector<double> mean, low, high;
};

struct SettingSummary {
  std::string name, title;
  train::Options own;                // its options, if the study file itself describes it
  std::map<int64_t, double> losses;  // by seed
  Summary loss;
  int64_t failed = 0;  // seeds whose run failed, or cannot be read
  bool exploratory = true;
  std::map<std::string, BaselineComparison>
      against;  // by baseline; none against itself or without common seeds
  double tokens_per_second = kUnknown, slowest = kUnknown, fastest = kUnknown;
  double optimizer_share = kUnknown, seconds = kUnknown;
  Band curve;
  std::map<std::string, Band> differences;  // by baseline
};

/// Runs of one variant; the empty name is the study itself.
struct VariantSummary {
  std::string name;
  train::Options options;
  std::vector<SettingSummary> settings;

  const SettingSummary* find(const std::string& setting) const;
};

/// A/A: a setting against itself, from weights that differ by one rounding error.
struct Noise {
  std::string setting;
  Paired difference;
  double deviation = kUnknown;
  double largest = kUnknown;
};

struct Analysis {
  VariantSummary main;
  std::vector<VariantSummary> variants;  // and each at its best muon-lr, if some differ in that
  /// Whole matrices and QK in random groups, on the seeds that all of these have: they are compared with each other.
  VariantSummary group_sizes;
  std::optional<Noise> noise;
};

/// Seeds that all of these have.
std::set<int64_t> common_seeds(const std::vector<std::map<int64_t, double>>& losses);

/// a less b for each seed that both have.
std::vector<double> differences_of(
    const std::map<int64_t, double>& a, const std::map<int64_t, double>& b);

/// Loss after the last step by seed, of the runs that count.
std::map<int64_t, double> losses_of(
    const Results& results, const std::string& setting, const std::string& variant = "");

/// How many seeds have no loss because their run failed or cannot be read.
int64_t failures_of(
    const Results& results, const std::string& setting, const std::string& variant = "");

/// Validation losses by seed.
std::map<int64_t, Curve> curves_of(
    const Results& results, const std::string& setting, const std::string& variant = "");

/// Steps that all of the curves have, with mean and interval.
Band band_of(const std::vector<Curve>& curves);

/// a less b at every step both have, for every seed both have.
std::vector<Curve> differences_of(
    const std::map<int64_t, Curve>& a, const std::map<int64_t, Curve>& b);

Analysis analyze(const Folder& folder, const Results& results);

}  // namespace study
