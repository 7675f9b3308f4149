#pragma once
// What a study will cost: estimates, before any of it is run.

#include <cstdint>

#include "study/folder.h"

namespace study {

/// Bytes that a training process needs, about. The config has its vocabulary and micro-batch.
int64_t memory_of(const train::Config& config);

/// Bytes on disk of one checkpoint.
int64_t checkpoint_bytes(const train::Config& config);

struct Cost {
  int64_t runs = 0, left = 0;    // planned, and neither finished nor failed
  double tokens = 0, flops = 0;  // of what is left
  double job_seconds = 0;        // of what is left, one run after the other
  double seconds = 0;            // with jobs side by side
  int64_t disk = 0;              // bytes of checkpoints in the end, and of those that are running
  int64_t memory = 0;            // bytes, of all jobs together
};

/// Times a few micro-batches, optimizer steps and parts of a validation of every model in the plan on random tokens. Jobs
/// are taken not to be in each other's way; diagnostics and checkpoints are not counted.
Cost estimate_cost(const Folder& folder, const std::string& device, int64_t jobs, int64_t threads);

}  // namespace study
