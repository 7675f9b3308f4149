#pragma once
// Estimates of what a study will cost, before it runs.

#include <cstdint>

#include "study/folder.h"

namespace study {

/// Approximate memory of a training process in bytes. Vocabulary and micro-batch of the config must be resolved.
double memory_of(const train::Config& config);

/// Size of a checkpoint on disk in bytes.
double checkpoint_bytes(const train::Config& config);

struct Cost {
  int64_t runs = 0, left = 0;    // runs planned, and runs neither finished nor failed
  double tokens = 0, flops = 0;  // tokens and FLOPs left
  double job_seconds = 0;        // seconds left if runs follow one another
  double seconds = 0;            // seconds left with all jobs in parallel
  double disk = 0;               // bytes of checkpoints kept, or of running jobs if none are kept
  double memory = 0;             // bytes of memory of all jobs together
};

/// Times a few micro-batches, optimizer steps and validation batches of every model in the plan, on random tokens.
/// Assumes that jobs do not slow each other down. Ignores diagnostics and checkpoints.
Cost estimate_cost(const Folder& folder, const std::string& device, int64_t jobs, int64_t threads);

}  // namespace study
