#pragma once
// Analyzes a checkpoint: the predicted gain and cost of each grouping of the attention matrices, and the actual
// change of the loss after one step from the same weights and momentum.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "group_muon/diagnostics.h"
#include "train/direct_test.h"

namespace train {

struct AnalyzeOptions {
  std::string path;         // a run or a checkpoint
  std::string data = {};    // empty: the run's data
  std::string groups = {};  // same form as diagnose-groups
  double lr = 0;            // 0: that of the next step, or the peak if the run is finished
  std::vector<double> factors = {0.5, 1, 2};  // multiples of lr to try; must include 1
  std::vector<int64_t> layers = {};           // empty: all
  int64_t sequences = 0;                      // per batch; 0: as many as in a training batch
  bool exact = true;                          // exact singular values instead of estimates
  int64_t threads = 0;                        // 0: as in the run
};

/// Results of one candidate on one matrix.
struct CandidateResult {
  std::string candidate;           // packed, three-way, or a grouping
  group_muon::Whitening momentum;  // O from the momentum, as in the optimizer
  group_muon::Whitening gradient;  // O from the gradient alone
  std::vector<DirectStep> steps;
};

/// Compares the criterion's choice with the actual best at one learning rate. Candidates are given by index.
struct CriterionCheck {
  double factor = 1;         // multiple of lr
  size_t favoured = 0;       // largest guaranteed decrease, the criterion's choice
  size_t first_order = 0;    // largest ⟨G, sO⟩
  size_t best = 0;           // largest decrease of the loss on the same batch
  size_t best_held_out = 0;  // largest decrease on the held-out batch
  bool agrees = false;       // `favoured` is the best, or within noise of it
  bool agrees_held_out = false;
  bool first_order_agrees = false;
};

struct MatrixResult {
  std::string name;       // "0.q", "0.qkv", …, "all"
  double beta = 0;        // along the three-way update at lr; if negative, the criterion uses 0
  double beta_noise = 0;  // uncertainty of beta due to noise in the loss
  std::vector<CandidateResult> candidates;
  std::vector<CriterionCheck> checks;  // one per factor
};

struct CheckpointAnalysis {
  std::string checkpoint;
  int64_t step = 0;
  double lr = 0;
  double loss = 0, held_out_loss = 0;
  double noise = 0, held_out_noise = 0;  // effect of one rounding error in the weights
  std::vector<MatrixResult> matrices;    // Q, K, V and QKV of each layer, then all layers together
};

/// `progress` gets the fraction done; it may be empty.
CheckpointAnalysis analyze(
    const AnalyzeOptions& options, const std::function<void(double)>& progress);

/// The entry for this factor; throws if there is none.
const DirectStep& find_step(const CandidateResult& candidate, double factor, bool rescaled);
const CriterionCheck& check_at(const MatrixResult& matrix, double factor);

}  // namespace train
