#pragma once
// What may be done to a segment's blocks before and after they are orthogonalized. Blocks are
// [matrices, groups, block rows, block cols], as take_blocks() returns them.

#include <ATen/core/Tensor.h>

namespace group_muon {

/// The blocks with each output neuron's row divided by its norm (MuonEq's variant R). `transposed`: stored as in × out,
/// so that output neurons are columns. Rows of zeros stay zero. At least fp32.
at::Tensor with_balanced_rows(const at::Tensor& blocks, bool transposed);

/// Estimated spectral norm of each of `matrices` ([count, rows, cols]): eight power iterations of eight vectors, which
/// always start alike, then the largest singular value on what they span. Never too large but for rounding. In fp32;
/// NaN for a matrix with NaN or Inf.
at::Tensor spectral_norms(const at::Tensor& matrices);

/// Scales the update of each matrix, assembled from its blocks along the axis (0: rows, 1: columns), down to the
/// spectral norm of its largest block, in place. A single block is left as it is.
void match_spectral_norm(const at::Tensor& blocks, int64_t axis);

}  // namespace group_muon
