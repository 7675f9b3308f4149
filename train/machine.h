#pragma once
// The machine a run is on: facts for the run's record, and its peak speed for comparison.

#include <torch/types.h>

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "group_muon/engine.h"

namespace train {

/// Host, processor, cores, threads, torch version, and the commit this program was built from.
nlohmann::ordered_json machine_facts();

/// FLOP/s of a large matrix product in this precision: the best of libtorch's product and, if it computes in the
/// precision, the engine's. Each is timed for an eighth of a second.
double gemm_peak(
    group_muon::Engine engine, torch::ScalarType precision, const torch::Device& device);

/// Bytes per second, read and written, of a copy on the CPU that fits in no cache.
double copy_bandwidth();

}  // namespace train
