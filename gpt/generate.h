#pragma once
// Text from a model: one token after the other.

#include <cstdint>
#include <functional>
#include <vector>

#include "gpt/model.h"

namespace gpt {

struct GenerateOptions {
  int64_t tokens = 200;
  double temperature = 0.8;  // 0: always the likeliest token
  int64_t top_k = 50;        // draw among so many; 0: among all
  uint64_t seed = 0;
};

/// Calls take(id) for every token that follows the prompt, and ends when it returns false. A text
/// longer than the context goes on with the last half of it in view.
void generate(
    Model& model, std::vector<uint32_t> prompt, const GenerateOptions& options,
    const std::function<bool(uint32_t)>& take);

}  // namespace gpt
