#pragma once
// The results of a study's runs, read from their files.

#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "study/folder.h"

namespace study {

constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

/// Validation loss by step.
using Curve = std::map<int64_t, double>;

/// What --diagnose-every measured, by step: means over Q and K of all layers. Gains and costs are fractions of the
/// whole matrix's value.
struct DiagnosticSeries {
  std::string of;        // gradient or momentum
  std::string grouping;  // three-way (whole), 1, 6:random, …
  std::vector<int64_t> steps;
  std::vector<double> rank_ratio;          // rank at 0.01 σ₁, divided by rows
  std::vector<double> rank_ratio_machine;  // rank above machine precision, divided by rows
  std::vector<double> squared_norm_ratio;  // ‖O‖² divided by its ideal, the full rank
  std::vector<double> gain, first_order_gain, norm_cost;
  double larger_norms = 0;  // fraction of matrices and steps with ‖O‖² above the whole matrix's
};

struct RunResult {
  PlannedRun run;
  RunState state = RunState::kWaiting;
  bool readable = true;
  std::string error;  // why the run failed or its files cannot be read
  double loss = kUnknown;
  Curve curve;
  double seconds = kUnknown;            // time spent on steps
  double tokens_per_second = kUnknown;  // mean over all steps
  double optimizer_share = kUnknown;    // the optimizer's fraction of the steps' time
  std::map<std::string, std::string> config;
  /// Engines that its validations name, by config key; several if it was resumed with another.
  std::map<std::string, std::set<std::string>> engines;
  std::vector<nlohmann::json> machines;  // machines and builds it ran on, in order
  std::vector<DiagnosticSeries> diagnostics;

  bool counts() const { return state == RunState::kFinished && readable; }
};

/// All runs of the plan. A run with damaged or incomplete files is unreadable and named in `problems`.
struct Results {
  std::vector<RunResult> runs;
  std::vector<std::string> problems;
};
Results read_results(const Folder& folder);

}  // namespace study
