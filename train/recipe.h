#pragma once
// Turns a config into a model, optimizer and learning rates.

#include "gpt/model.h"
#include "group_muon/assemble.h"
#include "train/config.h"

namespace train {

/// Rejects invalid values. The error names the key and the value.
void check(const Config& config);

gpt::ModelShape model_shape(const Config& config);
torch::ScalarType matmul_precision(const std::string& name);

/// The config with "auto" resolved for this machine: precisions, engine and method.
Config with_engine(Config config);

/// The config with engines that do not run here replaced by "auto".
Config without_missing_engines(Config config);

/// One line on the cost of bf16 if the run uses it and this machine has it only in software; otherwise empty.
std::string software_bf16_note(const Config& config);

group_muon::AssembleOptions optimizer_options(const Config& config);

/// Notes on parts of grouping schedules that no step uses.
std::vector<std::string> unused_groupings(const Config& config);

/// Factor on both learning rates at 0-based step `step`: rises linearly over `warmup` steps, stays at 1, and falls
/// linearly over the last `warmdown` steps.
double lr_factor(const Config& config, int64_t step);

/// Moves every weight up or down by one fp32 rounding error. The signs are drawn from the seed.
void perturb(const std::vector<torch::Tensor>& weights, uint64_t seed);

}  // namespace train
