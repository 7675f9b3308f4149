#include "train/batch.h"

#include <ATen/ATen.h>

namespace train {

Batch read_batch(
    const gpt::TokenStream& stream, const std::vector<int64_t>& starts, int64_t context,
    const torch::Device& device) {
  const torch::Tensor tokens =
      at::empty({static_cast<int64_t>(starts.size()), context + 1}, at::kLong);
  auto* row = tokens.data_ptr<int64_t>();
  for (const int64_t start : starts) {
    stream.read(start, context + 1, row);
    row += context + 1;
  }
  const auto part = [&](int64_t first) { return tokens.narrow(1, first, context).to(device); };
  return {part(0), part(1)};
}

}  // namespace train
