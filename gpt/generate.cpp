#include "gpt/generate.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

namespace gpt {
namespace {

using torch::Tensor;

// logits: [vocabulary]
uint32_t draw(Tensor logits, const GenerateOptions& options, at::Generator& generator) {
  TORCH_CHECK(logits.isfinite().all().item<bool>(), "the model's output is not finite");
  if (options.temperature == 0) return static_cast<uint32_t>(logits.argmax().item<int64_t>());
  logits = (logits - logits.max()) / options.temperature;
  if (options.top_k > 0 && options.top_k < logits.size(0)) {
    const Tensor least = std::get<0>(logits.topk(options.top_k)).min();
    logits = logits.masked_fill(logits < least, -INFINITY);
  }
  return static_cast<uint32_t>(
      at::multinomial(logits.softmax(0), 1, /*replacement=*/true, generator).item<int64_t>());
}

Tensor row(const std::vector<uint32_t>& ids, const at::Device& device) {
  return at::tensor(std::vector<int64_t>(ids.begin(), ids.end()), at::kLong)
      .to(device)
      .unsqueeze(0);
}

}  // namespace

void generate(
    Model& model, std::vector<uint32_t> prompt, const GenerateOptions& options,
    const std::function<bool(uint32_t)>& take) {
  TORCH_CHECK_VALUE(!prompt.empty(), "the prompt should have at least one token");
  TORCH_CHECK_VALUE(
      options.temperature == 0 || (options.temperature >= 1e-3 && options.temperature <= 1e3),
      "temperature should be 0, or from 0.001 to 1000, not ", options.temperature);
  TORCH_CHECK_VALUE(options.tokens > 0, "tokens should be 1 or more, not ", options.tokens);
  TORCH_CHECK_VALUE(options.top_k >= 0, "top-k should be 0 or more, not ", options.top_k);
  const c10::InferenceMode inference;
  const auto context = static_cast<size_t>(model.shape().context);
  const at::Device device = model.parameters().front().device();
  auto generator = at::detail::createCPUGenerator(options.seed);
  std::vector<uint32_t> view = std::move(prompt);  // the tokens the model sees
  if (view.size() > context) view.erase(view.begin(), view.end() - static_cast<long>(context));
  KeyValueCache cache;
  Tensor logits = model.next_logits(row(view, device), cache);
  for (int64_t i = 0; i < options.tokens; ++i) {
    const uint32_t id = draw(logits[0].cpu(), options, generator);
    if (!take(id) || i + 1 == options.tokens) return;
    view.push_back(id);
    if (view.size() <= context) {
      logits = model.next_logits(row({id}, device), cache);
      continue;
    }
    const size_t kept = std::max<size_t>(1, context / 2);
    view.erase(view.begin(), view.end() - static_cast<long>(kept));
    cache = {};
    logits = model.next_logits(row(view, device), cache);
  }
}

}  // namespace gpt
