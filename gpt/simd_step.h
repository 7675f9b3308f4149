#pragma once
// The model's loss and gradients on our own engines: the forward and the backward pass written out,
// layer by layer, with every buffer reused from batch to batch.

#include <torch/types.h>

#include <memory>

#include "gpt/model.h"
#include "gpt/profile.h"

namespace gpt {

/// In one precision of products: bf16, float or (to check the formulas) double.
class SimdStep {
 public:
  virtual ~SimdStep() = default;

  /// The mean cross-entropy of `targets` given `tokens`, both [batch, tokens] on the CPU. With
  /// `share` ≠ 0 the gradients, times that, are added to those of the weights.
  virtual double run(const torch::Tensor& tokens, const torch::Tensor& targets, double share) = 0;
};

/// The engine is not portable, and computes in the precision. `weights` are the model's own: contiguous, on the CPU, in fp32 (fp64 for double).
std::unique_ptr<SimdStep> make_simd_step(
    Engine engine, const ModelShape& shape, const Weights& weights, torch::ScalarType precision,
    Profile& profile);

}  // namespace gpt
