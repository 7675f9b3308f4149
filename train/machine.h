#pragma once
// The machine a run is on: facts for its record, and the speed to measure it against.

#include <torch/types.h>

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace train {

/// Host, processor, cores, torch, the commit this program was built from.
nlohmann::ordered_json machine_facts();

/// Floating-point operations a second of a large matrix product, the best of a quarter second.
double gemm_peak(torch::ScalarType precision, const torch::Device& device);

}  // namespace train
