#pragma once
// Sequences of a token stream as the model takes them.

#include <torch/types.h>

#include <cstdint>
#include <vector>

#include "gpt/shards.h"

namespace train {

/// Tokens and, moved by one, targets: [sequences, context] each.
struct Batch {
  torch::Tensor tokens, targets;
};

/// The sequences that start there.
Batch read_batch(
    const gpt::TokenStream& stream, const std::vector<int64_t>& starts, int64_t context,
    const torch::Device& device);

}  // namespace train
