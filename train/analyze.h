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
  std::string path;                           // a run or a checkpoint
  std::string data = {};                      // empty: the run's
  std::string groups = {};                    // as diagnose-groups
  std::vector<double> factors = {0.5, 1, 2};  // on the learning rate of that step; one of them is 1
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
  double guaranteed = 0;           // with the curvature measured along the three-way update
  std::vector<DirectStep> steps;
};

struct MatrixResult {
  std::string name;  // "0.q" … or "all"
  double beta = 0;   // measured along the three-way update at factor 1
  std::vector<CandidateResult> candidates;
  // Indices of candidates.
  size_t favoured = 0;  // by the criterion, with that β
  size_t best = 0;      // by the loss on the same batch, at factor 1
  size_t best_held_out = 0;
};

struct Analysis {
  std::string checkpoint;
  int64_t step = 0;
  double lr = 0;
  double loss = 0, held_out_loss = 0;
  double noise = 0, held_out_noise = 0;  // what one rounding error of the weights does to them
  std::vector<MatrixResult> matrices;    // Q, K and V of every layer, then all together
};

/// `progress`, which may be empty, gets the part that is done.
Analysis analyze(const AnalyzeOptions& options, const std::function<void(double)>& progress);

/// The one at this factor; an error if there is none.
const DirectStep& find_step(const CandidateResult& candidate, double factor, bool rescaled);

}  // namespace train
