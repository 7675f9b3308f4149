#pragma once
// Memory: what a model and its training need, and what this machine or its container has.

#include <cstdint>
#include <optional>
#include <string>

#include "train/config.h"

namespace train {

/// Bytes that this process can still get: what is free on the machine, or less if its cgroup (version 1 or 2) allows
/// less. Nothing if unknown. Reads below `root`: /proc/meminfo, /proc/self/cgroup and /sys/fs/cgroup.
std::optional<int64_t> available_memory(const std::string& root = "");

/// Numbers of weights: in the transformer blocks, and in the embedding, which is also the head. Doubles, because absurd
/// sizes do not fit in integers.
double block_weights(const Config& config);
double embedding_weights(const Config& config);

/// The least number of bytes that training with a config takes. The vocabulary and the micro-batch may be unknown (0).
double least_training_memory(const Config& config);

/// The least number of bytes that the model's weights take.
double least_model_memory(const Config& config);

/// Refuses what cannot fit, before anything is allocated: "training needs at least 96.0 GB of memory (…)".
void require_training_memory(const Config& config);
void require_model_memory(const Config& config);

}  // namespace train
