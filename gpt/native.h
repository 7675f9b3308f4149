#pragma once
// The model's loss and gradients on the CPU's own kernels: the forward and the backward pass written out,
// layer by layer, with every buffer reused from batch to batch.

#include <torch/types.h>

#include <memory>

#include "gpt/model.h"
#include "gpt/profile.h"

namespace gpt {

/// Whether this CPU has what the kernels need.
bool has_native_kernels();

/// In one precision of products: bf16, float or (to check the formulas) double.
class NativeStep {
 public:
  virtual ~NativeStep() = default;

  /// The mean cross-entropy of `targets` given `tokens`, both [batch, tokens] on the CPU. With
  /// `share` ≠ 0 the gradients, times that, are added to those of the weights.
  virtual double run(const torch::Tensor& tokens, const torch::Tensor& targets, double share) = 0;
};

/// `weights` are the model's own: contiguous, on the CPU, in fp32 (fp64 for double).
std::unique_ptr<NativeStep> make_native_step(
    const ModelShape& shape, const Weights& weights, torch::ScalarType precision, Profile& profile);

}  // namespace gpt
