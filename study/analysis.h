#pragma once
// Evaluates the results of a study: every setting against the baselines, the noise, and curves with bands.

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "study/results.h"
#include "study/statistics.h"

namespace study {

/// The two Full-QKV Muons that everything is compared with.
constexpr const char* kBaselines[] = {"packed", "three-way"};

/// With fewer seeds a result is exploratory: with 5, no p-value from sign flips is below 0.05. A setting with failed
/// runs is also exploratory, because the remaining runs may be the lucky ones.
constexpr int64_t kEnoughSeeds = 6;

enum class Mark { kUndecided, kBetter, kWorse };
std::string to_string(Mark mark);

/// Better or worse only if the interval that holds for all comparisons at once excludes 0.
Mark mark_of(const Paired& difference);

/// How soon a setting reaches the baseline's final loss: its first step at or below that loss, linear between
/// validations, as a fraction of the baseline's steps. Seed by seed, each with the baseline's loss at the same seed.
struct StepsToLoss {
  int64_t seeds = 0;         // that both have
  int64_t reached = 0;       // seeds that get there; the others have no fraction
  double median = kUnknown;  // over all seeds; unknown unless more than half of them get there
  std::optional<Paired>
      less;  // fraction minus 1, only if all seeds get there: others would make it too small
  double holm =
      kUnknown;  // p-value, corrected for the family of the loss; a setting without one counts as 1
  Mark mark = Mark::kUndecided;
};

/// The first step at which the curve is at or below the loss, linear between validations. Nothing if it never is.
std::optional<double> first_step_at(const Curve& curve, double loss);

/// A setting against a baseline. Exploratory comparisons form one family, all others another.
struct BaselineComparison {
  Paired difference;  // loss minus the baseline's, seed by seed
  bool exploratory = true;
  int64_t family = 0;      // number of comparisons in its family
  double holm = kUnknown;  // p-value, corrected for its family
  Mark mark = Mark::kUndecided;
  StepsToLoss steps;
};

/// Mean over seeds at every step, with its 95% interval.
struct Band {
  int64_t count = 0;
  std::vector<int64_t> steps;
  std::vector<double> mean, low, high;
};

struct SettingSummary {
  std::string name, title;
  train::Options own;                // its options, if the study file defines it
  std::map<int64_t, double> losses;  // by seed
  std::map<int64_t, Curve> curves;   // by seed
  Summary loss;
  int64_t failed = 0;  // number of seeds whose run failed or cannot be read
  bool exploratory = true;
  std::map<std::string, BaselineComparison> against;  // by baseline, where seeds are shared
  double tokens_per_second = kUnknown, slowest = kUnknown, fastest = kUnknown;
  double optimizer_share = kUnknown, seconds = kUnknown;
  Band curve;
  std::map<std::string, Band> differences;  // by baseline
};

/// Results of one variant. An empty name means the study itself.
struct VariantSummary {
  std::string name;
  train::Options options;
  std::vector<SettingSummary> settings;

  const SettingSummary* find(const std::string& setting) const;
};

/// A/A: a setting against itself, started from weights that differ by one rounding error.
struct Noise {
  std::string setting;
  Paired difference;
  double deviation = kUnknown;
  double largest = kUnknown;
};

/// A setting's losses at every value of an option that variants set, on the seeds that all values have.
struct ValueChoice {
  struct Tried {
    std::string value;
    Summary loss;
    int64_t failed = 0;
  };
  std::string setting, title;
  std::vector<Tried> tried;  // by size; a value whose runs all failed has no losses
  std::string best;
  bool at_edge =
      false;  // the smallest or largest value that has losses, so a better one may lie beyond it
};

/// The best value of an optimizer option for each setting, such as muon-lr.
struct BestValues {
  std::string key;
  std::vector<ValueChoice> settings;
};

struct Analysis {
  VariantSummary main;
  std::vector<VariantSummary> variants;  // for each of best_values also "best muon-lr"
  std::vector<BestValues> best_values;   // for options that alone tell variants apart
  /// Whole matrices and QK in random groups, only on seeds that all of them have, so that they can be compared.
  VariantSummary group_sizes;
  std::optional<Noise> noise;
};

/// Seeds that all settings have.
std::set<int64_t> common_seeds(const std::vector<std::map<int64_t, double>>& losses);

/// a - b for each seed that both have.
std::vector<double> differences_of(
    const std::map<int64_t, double>& a, const std::map<int64_t, double>& b);

/// Final losses by seed, of finished and readable runs.
std::map<int64_t, double> losses_of(
    const Results& results, const std::string& setting, const std::string& variant = "");

/// Number of seeds without a loss because the run failed or cannot be read.
int64_t failures_of(
    const Results& results, const std::string& setting, const std::string& variant = "");

/// Validation curves by seed.
std::map<int64_t, Curve> curves_of(
    const Results& results, const std::string& setting, const std::string& variant = "");

/// Mean and interval at the steps that all curves have.
Band band_of(const std::vector<Curve>& curves);

/// a - b at every step and for every seed that both have.
std::vector<Curve> differences_of(
    const std::map<int64_t, Curve>& a, const std::map<int64_t, Curve>& b);

Analysis analyze(const Folder& folder, const Results& results);

}  // namespace study
