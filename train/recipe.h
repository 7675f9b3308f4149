#pragma once
// What a config means: the model, the optimizers and the learning rate of a run.

#include "gpt/model.h"
#include "group_muon/assemble.h"
#include "train/config.h"

namespace train {

/// Refuses values that make no sense, naming key and value.
void check(const Config& config);

gpt::ModelShape model_shape(const Config& config);
torch::ScalarType matmul_precision(const std::string& name);
group_muon::AssembleOptions optimizer_options(const Config& config);

/// Notes on parts of grouping schedules that begin after the last step.
std::vector<std::string> unused_groupings(const Config& config);

/// The factor on both learning rates at 0-based step t: rising over `warmup` steps, 1, and falling
/// linearly over the last `warmdown` steps.
double lr_factor(const Config& config, int64_t step);

/// Moves every weight up or down by one rounding error of fp32, drawn from the seed.
void perturb(const std::vector<torch::Tensor>& weights, uint64_t seed);

/// The method, and what "auto" comes to on this machine.
std::string resolved_method(const Config& config);

}  // namespace train
