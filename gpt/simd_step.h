#pragma once
// The model's loss and gradients on our own engines: forward and backward passes written out layer by layer. All
// buffers are reused from batch to batch.

#include <torch/types.h>

#include <memory>

#include "gpt/profile.h"
#include "gpt/weights.h"
#include "group_muon/engine.h"

namespace gpt {

using group_muon::Engine;

/// Computes in one precision of products: bf16, float, or double (used to test the formulas).
class SimdStep {
 public:
  virtual ~SimdStep() = default;

  /// Mean cross-entropy of `targets` given `tokens`, both [batch, tokens] on the CPU. If `share` ≠ 0, also adds the
  /// gradients, times `share`, to those of the weights.
  virtual double run(const torch::Tensor& tokens, const torch::Tensor& targets, double share) = 0;
};

/// The engine must not be portable and must compute in the precision. `weights` are the model's own: contiguous, on
/// the CPU, in fp32 (fp64 for double).
std::unique_ptr<SimdStep> make_simd_step(
    Engine engine, const ModelShape& shape, const Weights& weights, torch::ScalarType precision,
    Profile& profile);

}  // namespace gpt
