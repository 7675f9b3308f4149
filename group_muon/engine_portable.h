#pragma once
// The portable engine: every method in libtorch's operations, on any device. The reference for all other engines.

#include <ATen/core/Tensor.h>

#include "group_muon/iteration.h"

namespace group_muon {

/// Blocks of Frobenius norm 1 (a little less, by eps) in the working precision; zero stays zero. x: [count, rows, cols]
/// in fp32 or fp64.
at::Tensor normalized(const at::Tensor& x, const OrthogonalizeOptions& options);

/// Orthogonalizes all blocks in batched calls. x: [count, rows, cols] in fp32 or fp64; the options are resolved().
at::Tensor orthogonalize_portable(const at::Tensor& x, const OrthogonalizeOptions& options);

}  // namespace group_muon
