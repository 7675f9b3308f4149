#include "train/norms.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "group_muon/parallel.h"

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

// Elements of AdamW's weights that one process owns together (sharing.cpp).
constexpr int64_t kTogether = 64;

// Sum of the squares of `count` numbers, in an order that depends on the count alone.
double squares_of_line(const float* first, int64_t count, int64_t stride) {
  constexpr int kLanes = 8;
  double sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const double number = first[(i + lane) * stride];
      sums[lane] += number * number;
    }
  }
  for (; i < count; ++i) {
    const double number = first[i * stride];
    sums[0] += number * number;
  }
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// Sums of the squares of each line of a gradient.
std::vector<double> squares_of_lines(const group_muon::OwnGradient& gradient) {
  const Tensor grad = gradient.grad.to(at::kFloat).contiguous();
  const auto* data = grad.const_data_ptr<float>();
  const int64_t elements = grad.numel(), length = gradient.lines ? grad.size(-1) : kTogether;
  if (elements == 0) return {};
  if (gradient.lines == group_muon::Axis::kColumns) {
    const int64_t rows = grad.size(-2);
    std::vector<double> squares(elements / rows);
    group_muon::share_out(elements / rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const auto* matrix = data + i / length * rows * length;
        squares[i] = squares_of_line(matrix + i % length, rows, length);
      }
    });
    return squares;
  }
  std::vector<double> squares((elements + length - 1) / length);
  const auto lines = static_cast<int64_t>(squares.size());
  group_muon::share_out(lines, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      squares[i] =
          squares_of_line(data + i * length, std::min(length, elements - i * length), /*stride=*/1);
    }
  });
  return squares;
}

}  // namespace

ByKind copies_of(const std::vector<WeightKind>& kinds) {
  ByKind all;
  for (const auto& kind : kinds) {
    auto& copies = all.emplace_back();
    for (const auto& weight : kind.weights) copies.push_back(weight.clone());
  }
  return all;
}

std::vector<ExactSum> squares_of(
    const std::vector<WeightKind>& kinds, const std::vector<group_muon::OwnGradient>& gradients) {
  std::map<void*, size_t> kind_of;
  for (size_t i = 0; i < kinds.size(); ++i) {
    for (const auto& weight : kinds[i].weights) kind_of[weight.unsafeGetTensorImpl()] = i;
  }
  std::vector<ExactSum> sums(kinds.size());
  ByKind on_devices(kinds.size());  // processes train together on CPUs only
  for (const auto& gradient : gradients) {
    const size_t kind = kind_of.at(gradient.weight.unsafeGetTensorImpl());
    if (gradient.grad.is_cpu()) {
      for (const double squares : squares_of_lines(gradient)) sums[kind].add(squares);
    } else {
      on_devices[kind].push_back(gradient.grad);
    }
  }
  for (size_t kind = 0; kind < kinds.size(); ++kind) {
    if (!on_devices[kind].empty()) sums[kind].add(std::pow(norm_of(on_devices[kind]), 2));
  }
  return sums;
}

std::vector<double> squares_of(const ByKind& tensors) {
  std::vector<double> squares;
  for (const auto& kind : tensors) squares.push_back(std::pow(norm_of(kind), 2));
  return squares;
}

double norm_of(const std::vector<Tensor>& tensors) {
  return at::stack(at::_foreach_norm(tensors)).norm().item<double>();
}

double add_norms(
    Values& values, const std::string& prefix, const std::vector<WeightKind>& kinds,
    const std::vector<double>& squares) {
  double all = 0;
  for (size_t i = 0; i < kinds.size(); ++i) {
    values.emplace_back(prefix + "/" + kinds[i].name, std::sqrt(squares[i]));
    all += squares[i];
  }
  values.emplace_back(prefix, std::sqrt(all));
  return std::sqrt(all);
}

}  // namespace train
