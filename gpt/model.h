#pragma once
// The paper's GPT: RMS norms without gains, rotary positions, no biases, output head tied to the embedding. Queries and
// keys may be normalized head by head, which the paper does not do.

#include <torch/nn/module.h>
#include <torch/types.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gpt/weights.h"
#include "group_muon/engine.h"

namespace gpt {

using group_muon::Engine;

/// Rejects invalid shapes. The error names the value and what would be valid.
void check(const ModelShape& shape);

/// FLOPs of training on one token, forward and backward. Causal attention counts half, the embedding lookup nothing.
double training_flops_per_token(const ModelShape& shape);

/// Keys and values of the tokens seen so far, one pair per layer: [batch, kv heads, context, head_dim], with the
/// first `tokens` positions filled.
struct KeyValueCache {
  struct Layer {
    torch::Tensor keys, values;
  };
  std::vector<Layer> layers;
  int64_t tokens = 0;
};

class SimdStep;
class Profile;

/// Weights and the residual stream are fp32; `precision` applies to the matrix products, bf16 or fp32.
/// Parameter names are those of the paper's script, such as transformer.h.0.attn.c_attn.weight.
class Model : public torch::nn::Module {
 public:
  /// Initializes every weight like torch's linear layer: uniform in ±1/√fan_in, drawn from the seed.
  Model(const ModelShape& shape, torch::ScalarType precision, uint64_t seed);
  ~Model() override;

  const ModelShape& shape() const { return shape_; }
  void set_precision(torch::ScalarType precision) { precision_ = precision; }
  /// Selects what computes losses and gradients: libtorch's operations and autograd (portable, the default), or one
  /// of our own engines (simd_step.h). An engine that does not compute in the precision falls back to portable.
  void set_engine(Engine engine) { engine_ = engine; }

  /// Mean cross-entropy of `targets` given `tokens`, both [batch, tokens], in fp32. Always uses libtorch.
  torch::Tensor loss(const torch::Tensor& tokens, const torch::Tensor& targets);

  /// The same loss, computed by the selected engine. Also adds its gradients, times `share` (not 0), to those of the
  /// weights. Our own engines keep bf16 copies of the weights and refresh a copy when its weight's version changes.
  /// Every in-place operation changes the version; writing around autograd (`data()`) does not.
  double add_gradients(const torch::Tensor& tokens, const torch::Tensor& targets, double share);

  /// The same without gradients. Token losses are summed in fp64.
  double evaluate(const torch::Tensor& tokens, const torch::Tensor& targets);

  /// Time spent so far, by part. add_gradients() and evaluate() add to it.
  Profile& profile() { return *profile_; }

  /// Logits after the last token of each row, [batch, vocabulary] in fp32. `tokens` follow those in the cache and
  /// are added to it. Pass the prompt first, then one token at a time.
  torch::Tensor next_logits(const torch::Tensor& tokens, KeyValueCache& cache);

 private:
  bool has_simd_step() const;
  SimdStep& simd_step();
  torch::Tensor logits(const torch::Tensor& tokens);
  torch::Tensor hidden(const torch::Tensor& tokens, KeyValueCache* cache);
  torch::Tensor attention(
      const torch::Tensor& x, const Weights::Block& block, int64_t layer, KeyValueCache* cache);
  torch::Tensor rotated(const torch::Tensor& x, int64_t first_position) const;
  torch::Tensor product(const torch::Tensor& x, const torch::Tensor& weight) const;

  ModelShape shape_;
  torch::ScalarType precision_;
  Engine engine_ = Engine::kPortable;
  Weights weights_;
  std::unique_ptr<Profile> profile_;
  std::map<std::pair<Engine, torch::ScalarType>, std::unique_ptr<SimdStep>> steps_;
};

}  // namespace gpt
