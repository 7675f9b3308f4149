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
  int64_t total = 0;  // sequences of the batch that these are a part of; 0: these are all

  int64_t sequences() const { return total > 0 ? total : static_cast<int64_t>(starts.size()); }
};

/// Called before every micro-batch with the fraction that is done, and once if there is none. May throw to give up.
using BeforeMicroBatch = std::function<void(double done)>;

/// Adds the gradients of the whole batch's mean loss to the weights', as far as these sequences contribute to it.
/// Returns what each micro-batch contributes to that loss. How the batch is cut into micro-batches does not matter,
/// except for rounding.
std::vector<double> add_gradients(
    gpt::Model& model, const Batch& batch, const BeforeMicroBatch& before = {});

/// The same for weights without gradients, in a fixed tree of sums: every `together` micro-batches are added one after
/// the other, these sums in pairs of neighbours, those in pairs and so on; their number is a power of two. A process that
/// has a half, a quarter … of the whole batch then gets exactly what the tree of the whole batch has at that place.
/// Holds several gradients at once.
std::vector<double> add_gradients_in_tree(
    gpt::Model& model, const Batch& batch, int64_t together, const BeforeMicroBatch& before = {});

/// The sum of the losses of each micro-batch's sequences.
std::vector<double> losses(
    gpt::Model& model, const Batch& batch, const BeforeMicroBatch& before = {});
double mean_loss(gpt::Model& model, const Batch& batch);

/// The sum, in order.
double sum_of(const std::vector<double>& parts);

}  // namespace train
