#pragma once
// A checkpoint looked at closely: what each grouping of the attention matrices would gain and cost, and what it
// really does to the loss, in one step from the same weights and momentum.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "group_muon/diagnostics.h"
#include "train/direct_test.h"

namespace train {

struct AnalyzeOptions {
  std::string path;         // a run or a checkpoint
  std::string data = {};    // empty: the run's
  std::string groups = {};  // as diagnose-groups
  double lr = 0;            // 0: that of the next step; of a finished run, the peak
  std::vector<double> factors = {0.5, 1, 2};  // on lr; one of them is 1
  std::vector<int64_t> layers = {};           // empty: all
  int64_t sequences = 0;                      // of each batch; 0: those of a training batch
  bool exact = true;                          // singular values, not estimates
  int64_t threads = 0;                        // 0: the run's
};

/// What is known of one candidate on one matrix.
struct CandidateResult {
  std::string candidate;           // packed, three-way, or a grouping
  group_muon::Whitening momentum;  // O from the momentum, as the optimizer has it
  group_muon::Whitening gradient;  // O from the gradient alone
  std::vector<DirectStep> steps;
};

/// Candidates, by their numbers, at one learning rate.
struct CriterionCheck {
  double factor = 1;         // on lr
  size_t favoured = 0;       // by the criterion: the largest guaranteed decrease
  size_t first_order = 0;    // by ⟨G, sO⟩ alone
  size_t best = 0;           // by the loss on the same batch
  size_t best_held_out = 0;  // and on the held-out one
  bool agrees = false;       // what is favoured is the best, or within the noise of it
  bool agrees_held_out = false;
  bool first_order_agrees = false;
};

struct MatrixResult {
  std::string name;  // "0.q", "0.qkv", …, "all"
  double beta =
      0;  // measured along the three-way update at lr; the criterion takes 0 if it is negative
  double beta_noise = 0;  // what the noise of the loss makes of it
  std::vector<CandidateResult> candidates;
  std::vector<CriterionCheck> checks;  // one a factor
};

struct CheckpointAnalysis {
  std::string checkpoint;
  int64_t step = 0;
  double lr = 0;
  double loss = 0, held_out_loss = 0;
  double noise = 0, held_out_noise = 0;  // what one rounding error of the weights does to them
  std::vector<MatrixResult> matrices;    // Q, K, V and all of every layer, then all layers together
};

/// `progress`, which may be empty, gets the part that is done.
CheckpointAnalysis analyze(
    const AnalyzeOptions& options, const std::function<void(double)>& progress);

/// The one at this factor; an error if there is none.
const DirectStep& find_step(const CandidateResult& candidate, double factor, bool rescaled);
const CriterionCheck& check_at(const MatrixResult& matrix, double factor);

}  // namespace train
