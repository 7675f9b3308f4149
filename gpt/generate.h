#pragma once
// Generates text from a model, one token at a time.

#include <cstdint>
#include <functional>
#include <vector>

#include "gpt/model.h"

namespace gpt {

struct GenerateOptions {
  int64_t tokens = 200;
  double temperature = 0.8;  // 0: always the most likely token
  int64_t top_k = 50;        // sample from the k most likely tokens; 0: from all
  uint64_t seed = 0;
};

/// Calls take(id) for every generated token and stops when it returns false. When the context is full, generation
/// continues with its last half.
void generate(
    Model& model, std::vector<uint32_t> prompt, const GenerateOptions& options,
    const std::function<bool(uint32_t)>& take);

}  // namespace gpt
