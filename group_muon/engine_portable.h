#pragma once
// The portable engine: every method in libtorch's operations, on any device. The reference for all other engines.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "group_muon/iteration.h"

namespace group_muon {

/// Scales each block to Frobenius norm 1 (slightly less because of eps) in the working precision. Zero stays zero.
/// x: [count, rows, cols] in fp32 or fp64.
at::Tensor normalized(const at::Tensor& x, const OrthogonalizeOptions& options);

/// Steps after which the Gram methods restart here.
std::vector<int64_t> portable_restarts(const OrthogonalizeOptions& options);

/// Orthogonalizes all blocks in batched calls. x: [count, rows, cols] in fp32 or fp64. Options must be resolved().
at::Tensor orthogonalize_portable(const at::Tensor& x, const OrthogonalizeOptions& options);

}  // namespace group_muon
