#pragma once
// Norms of a model's tensors by kind of weight, as they appear in the metrics.

#include <string>
#include <utility>
#include <vector>

#include "gpt/model.h"
#include "group_muon/optimizer.h"
#include "train/exact_sum.h"

namespace train {

/// Weights of one kind. Their norms are reported together.
struct WeightKind {
  std::string name;
  std::vector<torch::Tensor> weights;
};

/// embedding, qkv, attention_output and mlp.
std::vector<WeightKind> kinds_of(const gpt::Model& model);

/// One list of tensors per kind of weight.
using ByKind = std::vector<std::vector<torch::Tensor>>;

/// Copies of the weights.
ByKind copies_of(const std::vector<WeightKind>& kinds);

/// Sums of the squares of gradients, one for each kind. They are exact above the lines that nobody divides, so those of
/// all processes add up to the same bits however many processes there are.
std::vector<ExactSum> squares_of(
    const std::vector<WeightKind>& kinds, const std::vector<group_muon::OwnGradient>& gradients);

/// Names and values of one line of the metrics.
using Values = std::vector<std::pair<std::string, double>>;

/// The norm of all tensors together.
double norm_of(const std::vector<torch::Tensor>& tensors);

/// Adds "PREFIX/kind" for every kind and "PREFIX" for all tensors to `values`. Returns the norm of all.
double add_norms(
    Values& values, const std::string& prefix, const std::vector<WeightKind>& kinds,
    const std::vector<double>& squares);

/// The sums of squares of tensors by kind.
std::vector<double> squares_of(const ByKind& tensors);

}  // namespace train
