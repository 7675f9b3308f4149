#include "train/batch.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>
#include <utility>

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
  if (all == 0 && before) before(0);
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

std::vector<double> add_gradients(
    gpt::Model& model, const Batch& batch, const BeforeMicroBatch& before) {
  std::vector<double> parts;
  for_each_micro_batch(
      model, batch, before, [&](const Tensor& tokens, const Tensor& targets, double count) {
        const double share = count / static_cast<double>(batch.sequences());
        parts.push_back(model.add_gradients(tokens, targets, share) * share);
      });
  return parts;
}

std::vector<double> add_gradients_in_tree(
    gpt::Model& model, const Batch& batch, int64_t together, const BeforeMicroBatch& before) {
  // Sums of neighbouring micro-batches, the largest first; no two of the same size.
  struct Sum {
    int64_t leaves;
    std::vector<Tensor> grads;
  };
  std::vector<Sum> sums;
  std::vector<double> parts;
  const auto weights = model.parameters();
  const auto add = [&](Sum sum) {
    while (!sums.empty() && sums.back().leaves == sum.leaves) {
      at::_foreach_add_(sums.back().grads, sum.grads);
      sum = {2 * sum.leaves, std::move(sums.back().grads)};
      sums.pop_back();
    }
    sums.push_back(std::move(sum));
  };
  const auto all = static_cast<int64_t>(batch.starts.size());
  const int64_t stretch = together * batch.micro_batch;
  const torch::NoGradGuard no_grad;
  for (int64_t first = 0; first < all; first += stretch) {
    Batch some = batch;
    some.total = batch.sequences();
    some.starts.assign(
        batch.starts.begin() + first, batch.starts.begin() + std::min(all, first + stretch));
    const auto before_some = [&](double done) {
      const double before_it = static_cast<double>(first) / static_cast<double>(all);
      if (before)
        before(
            before_it + done * static_cast<double>(some.starts.size()) / static_cast<double>(all));
    };
    {
      const at::AutoGradMode with_gradients(true);
      const auto own = add_gradients(model, some, before_some);
      parts.insert(parts.end(), own.begin(), own.end());
    }
    Sum sum{1, {}};
    for (const auto& weight : weights)
      sum.grads.push_back(std::exchange(weight.mutable_grad(), {}));
    add(std::move(sum));
  }
  TORCH_CHECK(sums.size() == 1, "the number of sums should be a power of two");
  for (size_t i = 0; i < weights.size(); ++i) {
    weights[i].mutable_grad() = sums[0].grads[i];
  }
  return parts;
}

std::vector<double> losses(gpt::Model& model, const Batch& batch, const BeforeMicroBatch& before) {
  std::vector<double> parts;
  for_each_micro_batch(
      model, batch, before, [&](const Tensor& tokens, const Tensor& targets, double count) {
        parts.push_back(model.evaluate(tokens, targets) * count);
      });
  return parts;
}

double mean_loss(gpt::Model& model, const Batch& batch) {
  return sum_of(losses(model, batch)) / static_cast<double>(batch.sequences());
}

double sum_of(const std::vector<double>& parts) {
  return std::accumulate(parts.begin(), parts.end(), 0.0);
}

}  // namespace train
