#pragma once
// Orthogonalization: blocks with singular values σ → the same blocks with σ near 1 (or exactly 1). One entry point
// for all engines.

#include <ATen/core/Tensor.h>

#include "group_muon/iteration.h"

namespace group_muon {

/// Orthogonalizes each matrix of `blocks` (… × m × n, any aspect ratio). Returns a new tensor of the same shape in
/// the working precision. A zero block gives zero, and a block with NaN or Inf gives NaN. Blocks do not affect
/// each other.
at::Tensor orthogonalize(const at::Tensor& blocks, const OrthogonalizeOptions& options);

}  // namespace group_muon
