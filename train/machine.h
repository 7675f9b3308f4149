#pragma once
// The machine a run is on: facts for its record, and the speed to measure it against.

#include <torch/types.h>

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "group_muon/engine.h"

namespace train {

/// Host, processor, cores, torch, the commit this program was built from.
nlohmann::ordered_json machine_facts();

/// Floating-point operations a second of a large matrix product in this precision, the best of a quarter second: of
/// libtorch's and, if it computes in the precision, the engine's.
double gemm_peak(
    group_muon::Engine engine, torch::ScalarType precision, const torch::Device& device);

}  // namespace train
