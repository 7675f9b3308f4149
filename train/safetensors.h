#pragma once
// Named tensors in a safetensors file: the length of the header, the header in JSON, the data.

#include <torch/types.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "train/files.h"

namespace train {

using NamedTensors = std::vector<std::pair<std::string, torch::Tensor>>;

/// Writes tensors from any device, in this order. Supports float32, float64, bfloat16, float16 and int64.
void save_tensors(
    OutputFile& file, const NamedTensors& tensors,
    const std::map<std::string, std::string>& metadata);

/// All tensors of a file, on the CPU. For a damaged file, the error says what is wrong: tensors must fill the file
/// without gap or overlap, and every size must fit its shape.
std::map<std::string, torch::Tensor> load_tensors(const std::string& path);

/// The metadata of a file, without reading its tensors.
std::map<std::string, std::string> load_metadata(const std::string& path);

}  // namespace train
