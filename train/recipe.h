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

/// The config with what "auto" comes to on this machine for precisions, engine and method.
Config with_engine(Config config);

/// The config's engine or, where it does not run here, what "auto" comes to.
group_muon::Engine engine_of(const Config& config);

/// One line on what bf16 costs on a machine that has it only in software; empty where that does not matter.
std::string software_bf16_note(const Config& config);

group_muon::AssembleOptions optimizer_options(const Config& config);

/// Notes on parts of grouping schedules that begin after the last step.
std::vector<std::string> unused_groupings(const Config& config);

/// The factor on both learning rates at 0-based step t: rising over `warmup` steps, 1, and falling
/// linearly over the last `warmdown` steps.
double lr_factor(const Config& config, int64_t step);

/// Moves every weight up or down by one rounding error of fp32, drawn from the seed.
void perturb(const std::vector<torch::Tensor>& weights, uint64_t seed);

}  // namespace train
