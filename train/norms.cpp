#include "train/norms.h"

#include <ATen/ATen.h>

#include <cmath>

namespace train {

using torch::Tensor;

std::vector<WeightKind> kinds_of(const gpt::Model& model) {
  std::vector<WeightKind> kinds = {
      {"embedding", {}}, {"qkv", {}}, {"attention_output", {}}, {"mlp", {}}};
  for (const auto& item : model.named_parameters()) {
    const auto& name = item.key();
    const auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
    const size_t kind = has("wte") ? 0 : has("attn.c_attn") ? 1 : has("attn.c_proj") ? 2 : 3;
    kinds[kind].weights.push_back(item.value());
  }
  return kinds;
}

namespace {

// What `take` makes of each weight.
template <typename Take>
ByKind of_each(const std::vector<WeightKind>& kinds, Take&& take) {
  ByKind all;
  for (const auto& kind : kinds) {
    auto& taken = all.emplace_back();
    for (const auto& weight : kind.weights) taken.push_back(take(weight));
  }
  return all;
}

}  // namespace

ByKind copies_of(const std::vector<WeightKind>& kinds) {
  return of_each(kinds, [](const Tensor& weight) { return weight.clone(); });
}

ByKind gradients_of(const std::vector<WeightKind>& kinds) {
  return of_each(kinds, [](const Tensor& weight) { return weight.grad(); });
}

double norm_of(const std::vector<Tensor>& tensors) {
  return at::stack(at::_foreach_norm(tensors)).norm().item<double>();
}

double add_norms(
    Values& values, const std::string& prefix, const std::vector<WeightKind>& kinds,
    const ByKind& tensors) {
  double squares = 0;
  for (size_t i = 0; i < kinds.size(); ++i) {
    const double norm = norm_of(tensors[i]);
    values.emplace_back(prefix + "/" + kinds[i].name, norm);
    squares += norm * norm;
  }
  values.emplace_back(prefix, std::sqrt(squares));
  return std::sqrt(squares);
}

}  // namespace train
