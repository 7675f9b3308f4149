#include "train/batch.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "gpt/profile.h"

namespace train {
namespace {

using torch::Tensor;

// Calls use(tokens, targets, number of sequences) for each micro-batch. Targets are the tokens shifted by one:
// [sequences, context] each.
template <typename Use>
void for_each_micro_batch(
    gpt::Model& model, const Batch& batch, const BeforeMicroBatch& before, Use&& use) {
  const auto all = static_cast<int64_t>(batch.starts.size());
  for (int64_t done = 0, count = 0; done < all; done += count) {
    if (before) before(static_cast<double>(done) / static_cast<double>(all));
    count = std::min(std::max<int64_t>(1, batch.micro_batch), all - done);
    const auto part = [&](const Tensor& tokens, int64_t first) {
      return tokens.narrow(1, first, batch.context).to(batch.device);
    };
    Tensor inputs, targets;
    {
      const auto timed = gpt::Timed(model.profile(), gpt::Part::kData);
      const Tensor tokens = at::empty({count, batch.context + 1}, at::kLong);
      auto* row = tokens.data_ptr<int64_t>();
      for (int64_t i = 0; i < count; ++i, row += batch.context + 1) {
        batch.stream->read(batch.starts[done + i], batch.context + 1, row);
      }
      inputs = part(tokens, 0);
      targets = part(tokens, 1);
    }
    use(inputs, targets, static_cast<double>(count));
  }
}

}  // namespace

double add_gradients(gpt::Model& model, const Batch& batch, const BeforeMicroBatch& before) {
  double mean = 0;
  for_each_micro_batch(
      model, batch, before, [&](const Tensor& tokens, const Tensor& targets, double count) {
        const double share = count / static_cast<double>(batch.starts.size());
        mean += model.add_gradients(tokens, targets, share) * share;
      });
  return mean;
}

double evaluate(gpt::Model& model, const Batch& batch, const BeforeMicroBatch& before) {
  double sum = 0;
  for_each_micro_batch(
      model, batch, before, [&](const Tensor& tokens, const Tensor& targets, double count) {
        sum += model.evaluate(tokens, targets) * count;
      });
  return sum / static_cast<double>(batch.starts.size());
}

}  // namespace train
