#pragma once
// Sequences of a token stream as input for the model.

#include <torch/types.h>

#include <cstdint>
#include <vector>

#include "gpt/shards.h"

namespace train {

/// Tokens and targets, which are the tokens shifted by one: [sequences, context] each.
struct Batch {
  torch::Tensor tokens, targets;
};

/// Reads the sequences that begin at `starts`.
Batch read_batch(
    const gpt::TokenStream& stream, const std::vector<int64_t>& starts, int64_t context,
    const torch::Device& device);

}  // namespace train
