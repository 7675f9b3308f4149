#pragma once
// One Group Muon step over a list of weights (Algorithm 1): momentum → plan → orthogonalize each bucket → update.

#include <ATen/core/Tensor.h>

#include <vector>

#include "group_muon/plan.h"

namespace group_muon {

/// Adds the gradients to the momentum. This is elementwise and does not depend on heads.
void accumulate_momentum(const std::vector<Weight>& weights, const StepOptions& options);

/// What a step would orthogonalize: the momentum including this gradient, or its look-ahead. Changes nothing.
at::Tensor look_ahead(const Weight& weight, const StepOptions& options);

/// The bucket's blocks of the momentum or its Nesterov look-ahead, balanced if wanted: [blocks, short, long].
at::Tensor gather(
    const Bucket& bucket, const std::vector<Weight>& weights, const StepOptions& options);

/// weight -= lr · scale · block, for each block at the rows it came from.
void apply(const Bucket& bucket, const at::Tensor& blocks, const std::vector<Weight>& weights);

/// The whole step.
void step(const std::vector<Weight>& weights, const StepOptions& options);

// The same step for weights whose elements lie on several processes, as three functions: what is elementwise is done on
// the parts that a process holds, and blocks are orthogonalized where they are whole. Together they write the bits that
// step() writes to whole, contiguous weights.

/// Adds the gradients to the momentum. Returns what is to be orthogonalized. The tensors may be any part of a weight.
std::vector<at::Tensor> accumulate_parts(
    const std::vector<Weight>& parts, const StepOptions& options);

/// Orthogonalizes the blocks of directions: whole weights, or the heads that `owned` names. Their tensors are `momentum`.
/// Returns tensors of the same sizes, in the working precision.
std::vector<at::Tensor> orthogonalize_parts(
    const std::vector<Weight>& weights, const StepOptions& options);

/// Which lines (rows, or columns if heads lie along columns) of a weight a part has.
struct HeldLines {
  std::vector<int64_t> sizes;  // of the whole weight
  std::vector<int64_t> runs;   // first line and number of lines of each run
};

/// weight ← decay·weight - lr·scale·update, for parts that have all or some of a weight's lines.
void apply_parts(
    const std::vector<Weight>& parts, const std::vector<HeldLines>& lines,
    const std::vector<at::Tensor>& updates, const StepOptions& options);

}  // namespace group_muon
