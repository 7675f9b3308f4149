#pragma once
// Orthogonalization: blocks with singular values σ → the same blocks with σ near 1 (or exactly 1). One entry for all
// engines.

#include <ATen/core/Tensor.h>

#include "group_muon/iteration.h"

namespace group_muon {

/// Orthogonalizes every matrix of `blocks` (… × m × n, any aspect ratio); returns a new tensor of
/// that shape in the working precision. Zero gives zero, a block with NaN or Inf gives NaN, and no
/// block touches another.
at::Tensor orthogonalize(const at::Tensor& blocks, const OrthogonalizeOptions& options);

}  // namespace group_muon
