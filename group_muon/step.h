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

/// The bucket's blocks of the momentum or its Nesterov look-ahead: [blocks, short, long].
at::Tensor gather(
    const Bucket& bucket, const std::vector<Weight>& weights, const StepOptions& options);

/// weight -= lr · scale · block, for each block at the rows it came from.
void apply(const Bucket& bucket, const at::Tensor& blocks, const std::vector<Weight>& weights);

/// The whole step.
void step(const std::vector<Weight>& weights, const StepOptions& options);

}  // namespace group_muon
