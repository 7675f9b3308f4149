#include "train/direct_test.h"

#include <ATen/ATen.h>

#include <cmath>

#include "group_muon/diagnostics.h"
#include "train/recipe.h"

namespace train {
namespace {

using torch::Tensor;

constexpr int kNoiseSamples = 4;

Tensor rows_of(const Tensor& tensor, const Piece& piece) {
  return tensor.narrow(0, piece.first, piece.rows);
}

}  // namespace

DirectTest::DirectTest(
    const std::vector<AttentionWeight>& weights, const std::vector<Candidate>& candidates,
    double lr, std::function<Losses()> losses)
    : weights_(weights), lr_(lr), losses_(std::move(losses)) {
  std::vector<Tensor> directions;
  for (const auto& [weight, options, gradient] : weights) {
    originals_.push_back(weight.value.detach().clone());
    directions.push_back(group_muon::look_ahead(weight, options));
  }
  for (const auto& candidate : candidates) {
    auto& updates = updates_.emplace_back();
    for (size_t w = 0; w < weights.size(); ++w) {
      auto cut = weights[w].weight;
      cut.layout = candidate.layout;
      updates.push_back(group_muon::scaled_update(directions[w], cut, weights[w].options));
    }
  }
  before_ = losses_();
}

DirectTest::~DirectTest() { restore(); }

void DirectTest::restore() {
  const torch::NoGradGuard no_grad;
  for (size_t w = 0; w < weights_.size(); ++w) weights_[w].weight.value.copy_(originals_[w]);
}

Losses DirectTest::noise() {
  Losses squares;
  for (int i = 0; i < kNoiseSamples; ++i) {
    std::vector<Tensor> values;
    for (const auto& weight : weights_) values.push_back(weight.weight.value);
    perturb(values, i);
    const auto now = losses_();
    squares.same += std::pow(now.same - before_.same, 2);
    squares.held_out += std::pow(now.held_out - before_.held_out, 2);
    restore();
  }
  return {std::sqrt(squares.same / kNoiseSamples), std::sqrt(squares.held_out / kNoiseSamples)};
}

DirectTest::Terms DirectTest::terms(const Region& region, size_t candidate) const {
  Terms sum;
  for (const auto& piece : region.pieces) {
    const Tensor update = rows_of(updates_[candidate][piece.weight], piece).to(at::kDouble);
    const Tensor gradient = rows_of(weights_[piece.weight].gradient, piece).to(at::kDouble);
    sum.first_order += (gradient * update).sum().item<double>();
    sum.squares += update.square().sum().item<double>();
  }
  return sum;
}

DirectStep DirectTest::step(const Region& region, size_t candidate, double factor, bool rescaled) {
  const torch::NoGradGuard no_grad;
  const auto own = terms(region, candidate);
  double rate = lr_ * factor;
  if (rescaled && own.squares > 0)
    rate *= std::sqrt(terms(region, kThreeWay).squares / own.squares);
  for (const auto& piece : region.pieces) {
    const Tensor update = rows_of(updates_[candidate][piece.weight], piece);
    rows_of(weights_[piece.weight].weight.value, piece)
        .copy_(rows_of(originals_[piece.weight], piece) - rate * update);
  }
  const auto after = losses_();
  restore();
  DirectStep result;
  result.factor = factor;
  result.rescaled = rescaled;
  result.norm = rate * std::sqrt(own.squares);
  result.first_order = rate * own.first_order;
  result.decrease = before_.same - after.same;
  result.held_out_decrease = before_.held_out - after.held_out;
  result.curvature = 2 * (result.first_order - result.decrease) / (result.norm * result.norm);
  return result;
}

}  // namespace train
