#pragma once
// Tensors by name in a safetensors file: the length of a header, the header in JSON, the numbers.

#include <torch/types.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "train/files.h"

namespace train {

using NamedTensors = std::vector<std::pair<std::string, torch::Tensor>>;

/// Writes tensors of any device, in this order. float32, float64, bfloat16, float16 and int64.
void save_tensors(
    OutputFile& file, const NamedTensors& tensors,
    const std::map<std::string, std::string>& metadata);

/// All tensors of a file, on the CPU; a file that is not whole is an error that says why.
std::map<std::string, torch::Tensor> load_tensors(const std::string& path);

}  // namespace train
