#pragma once
// Batches: sequences of a token stream, and the model's loss and gradients on them, a micro-batch at a time.

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "gpt/model.h"
#include "gpt/shards.h"

namespace train {

/// Sequences of `context` tokens that begin at `starts`. The model gets at most `micro_batch` of them at once.
struct Batch {
  const gpt::TokenStream* stream;
  std::vector<int64_t> starts;
  int64_t context;
  int64_t micro_batch;
  torch::Device device = torch::kCPU;
};

/// Called before every micro-batch with the fraction that is done. May throw to give up.
using BeforeMicroBatch = std::function<void(double done)>;

/// Adds the gradients of the batch's mean loss to the weights' and returns that loss. How the batch is cut into
/// micro-batches does not matter, except for rounding.
double add_gradients(gpt::Model& model, const Batch& batch, const BeforeMicroBatch& before = {});

/// The mean loss of the batch.
double evaluate(gpt::Model& model, const Batch& batch, const BeforeMicroBatch& before = {});

}  // namespace train
