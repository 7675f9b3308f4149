#pragma once
// What a step costs before anything runs: arithmetic, memory traffic, messages and state of each process. Follows from
// shapes, layouts and options alone, for weights of any size.

#include <cstdint>
#include <vector>

#include "group_muon/iteration.h"
#include "group_muon/sharing.h"

namespace group_muon {

/// FLOPs of orthogonalizing a block, as its engine computes it: our own engines compute half of a symmetric product,
/// libtorch computes all of it. `options` must be resolved(). There is no estimate for Method::kExact.
double block_flops(int64_t short_side, int64_t long_side, const OrthogonalizeOptions& options);

/// How processes share a step.
enum class StepSharing {
  kLocal,     // each gradient goes to its owner, new values come back (Exchange with gradients)
  kAveraged,  // DistributedDataParallel averages gradients; owners send new values (Exchange without)
  kSharded,    // FSDP2: blocks within a shard stay there; others go to an owner and back
  kGathered,   // FSDP2: every process gathers every matrix and computes all blocks
  kRedundant,  // DistributedDataParallel averages gradients; every process computes everything
};

/// One process and one step.
struct ProcessCost {
  double flops = 0;  // of orthogonalization
  double memory =
      0;  // bytes read and written by elementwise work, at least: gradient, state and weight
  double sent = 0;   // bytes sent by the optimizer
  double state = 0;  // bytes of momentum and AdamW's averages
};

struct StepCost {
  std::vector<ProcessCost> processes;
  double framework_sent = 0;  // bytes that DDP or FSDP2 sends in addition, per process
};

/// The cost if every weight has a gradient. Schedules count with their most expensive grouping.
StepCost step_cost(
    const std::vector<SharedWeight>& weights, int processes, StepSharing sharing,
    const OrthogonalizeOptions& options);

/// The largest and the mean value of a member.
double largest(const StepCost& cost, double ProcessCost::* member);
double mean(const StepCost& cost, double ProcessCost::* member);

/// What a process can do in a second.
struct Speed {
  double flops = 0;    // FLOPs of matrix products
  double memory = 0;   // bytes read and written
  double network = 0;  // bytes sent
};

/// Seconds of the slowest process if nothing overlaps.
double seconds_of(const StepCost& cost, const Speed& speed);

}  // namespace group_muon
