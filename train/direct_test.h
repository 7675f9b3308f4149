#pragma once
// The actual change of the loss after one step along an update, from the same weights for every candidate.

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "train/candidates.h"

namespace train {

/// Losses on the gradient's own batch and on a held-out batch.
struct Losses {
  double same = 0;
  double held_out = 0;
};

/// Rows of a weight, given by its index.
struct Piece {
  size_t weight = 0;
  int64_t first = 0;
  int64_t rows = 0;
};

/// What a step changes together: one matrix, or several.
struct Region {
  std::string name;
  std::vector<Piece> pieces;
};

/// One step along one candidate's update, in one region.
struct DirectStep {
  double factor = 1;             // multiple of the learning rate
  bool rescaled = false;         // rescaled to the norm of the three-way update
  double norm = 0;               // ‖Δ‖ of the step
  double first_order = 0;        // ⟨G, Δ⟩
  double decrease = 0;           // decrease of the loss on the gradient's batch
  double held_out_decrease = 0;  // decrease of the loss on the held-out batch
  double curvature = 0;          // β = 2(L(W-Δ) - L(W) + ⟨G, Δ⟩) / ‖Δ‖²
};

/// Tries steps one at a time. After each step, and in the destructor, the weights are restored bit for bit.
class DirectTest {
 public:
  /// `losses` computes the losses at the current weights.
  DirectTest(
      const std::vector<AttentionWeight>& weights, const std::vector<Candidate>& candidates,
      double lr, std::function<Losses()> losses);
  ~DirectTest();
  DirectTest(const DirectTest&) = delete;
  DirectTest& operator=(const DirectTest&) = delete;

  const Losses& before() const { return before_; }

  /// Root mean square change of the losses from one rounding error in these weights. Smaller differences are noise.
  Losses noise();

  DirectStep step(const Region& region, size_t candidate, double factor, bool rescaled);

 private:
  struct Terms {
    double first_order = 0;  // ⟨G, sO⟩
    double squares = 0;      // ‖sO‖²
  };
  Terms terms(const Region& region, size_t candidate) const;
  void restore();

  std::vector<AttentionWeight> weights_;
  double lr_;
  std::function<Losses()> losses_;
  std::vector<torch::Tensor> originals_;
  std::vector<std::vector<torch::Tensor>> updates_;  // by candidate and weight
  Losses before_;
};

}  // namespace train
