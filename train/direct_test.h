#pragma once
// What one step along an update really does to the loss, from the same weights for every candidate.

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "train/candidates.h"

namespace train {

/// On the batch of the gradient, and on another one.
struct Losses {
  double same = 0;
  double held_out = 0;
};

/// Rows of the weight of that number.
struct Piece {
  size_t weight = 0;
  int64_t first = 0;
  int64_t rows = 0;
};

/// What is changed together: one matrix, or all.
struct Region {
  std::string name;
  std::vector<Piece> pieces;
};

/// One step along one candidate's update, on the rows of one matrix or on all of them together.
struct DirectStep {
  double factor = 1;             // on the learning rate
  bool rescaled = false;         // to the norm of the three-way update
  double norm = 0;               // ‖Δ‖ of the step
  double first_order = 0;        // ⟨G, Δ⟩
  double decrease = 0;           // of the loss on the batch of the gradient
  double held_out_decrease = 0;  // and on another one
  double curvature = 0;          // β = 2(L(W-Δ) - L(W) + ⟨G, Δ⟩) / ‖Δ‖²
};

/// Steps are tried one at a time; after each, and when it goes, weights are to the bit as before.
class DirectTest {
 public:
  /// `losses` are those of the weights as they are when it is called.
  DirectTest(
      const std::vector<AttentionWeight>& weights, const std::vector<Candidate>& candidates,
      double lr, std::function<Losses()> losses);
  ~DirectTest();
  DirectTest(const DirectTest&) = delete;
  DirectTest& operator=(const DirectTest&) = delete;

  const Losses& before() const { return before_; }

  /// Root mean square of what one rounding error of these weights does: smaller differences mean nothing.
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
