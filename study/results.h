#pragma once
// What the runs of a study came to, read from their files.

#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "study/folder.h"

namespace study {

constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

/// Validation loss by step.
using Curve = std::map<int64_t, double>;

/// Means over Q and K of all layers of what --diagnose-every measured, by step. Costs and gains are parts of the whole
/// matrix' own.
struct DiagnosticSeries {
  std::string of;        // gradient or momentum
  std::string grouping;  // three-way (whole), 1, 6:random, …
  std::vector<int64_t> steps;
  std::vector<double> rank_ratio;          // ranks at 0.01 σ₁ by rows
  std::vector<double> rank_ratio_machine;  // ranks above machine precision by rows
  std::vector<double> squared_norm_ratio;  // ‖O‖² by its ideal, the full rank
  std::vector<double> gain, first_order_gain, norm_cost;
  double larger_norms = 0;  // part of all matrices and steps with a larger ‖O‖² than the whole's
};

struct RunResult {
  PlannedRun run;
  RunState state = RunState::kWaiting;
  bool readable = true;
  std::string error;  // of a failed run, or why its files cannot be read
  double loss = kUnknown;
  Curve curve;
  double seconds = kUnknown;            // spent on steps
  double tokens_per_second = kUnknown;  // of all steps
  double optimizer_share = kUnknown;    // of the steps' time
  std::map<std::string, std::string> config;
  std::vector<nlohmann::ordered_json> machines;  // and builds that it ran on, one after the other
  std::vector<DiagnosticSeries> diagnostics;

  bool counts() const { return state == RunState::kFinished && readable; }
};

/// All runs of the plan. Files that are damaged or half written make their run unreadable; it is named in `problems`.
struct Results {
  std::vector<RunResult> runs;
  std::vector<std::string> problems;
};
Results read_results(const Folder& folder);

}  // namespace study
