#pragma once
// AdamW with libtorch's fused kernel, for the weights that are not Muon's: embeddings, head, gains, biases.

#include <torch/optim/adamw.h>

namespace group_muon {

/// The states of an optimizer's weights.
using ParamStates = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

/// Rejects a group with AdamWOptions that could not be stepped.
void check_adamw(const torch::optim::OptimizerParamGroup& group);

/// One step of a group with AdamWOptions: torch::optim::AdamW's, with its options and states, in one kernel.
void step_adamw(const torch::optim::OptimizerParamGroup& group, ParamStates& states);

}  // namespace group_muon
