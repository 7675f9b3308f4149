#pragma once
// The GPT of the paper's setting: RMS norms without gains, rotary positions, no biases, tied head.

#include <torch/nn/module.h>
#include <torch/types.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "group_muon/engine.h"

namespace gpt {

using group_muon::Engine;

struct ModelShape {
  int64_t layers = 12;
  int64_t heads = 12;
  int64_t kv_heads = 0;  // 0: as heads
  int64_t width = 768;
  int64_t context = 1024;
  int64_t vocabulary = 50257;

  int64_t head_dim() const { return width / heads; }
  int64_t key_heads() const { return kv_heads == 0 ? heads : kv_heads; }
  bool operator==(const ModelShape&) const = default;
};

/// Refuses shapes that make no sense, naming the value and what would be valid.
void check(const ModelShape& shape);

/// Floating-point operations of training on one token: forward and backward, causal attention counted
/// by half, the look-up not at all.
double training_flops_per_token(const ModelShape& shape);

/// Keys and values of the tokens seen so far, a pair a layer: [batch, kv heads, context, head_dim], of
/// which the first `tokens` are filled.
struct KeyValueCache {
  struct Layer {
    torch::Tensor keys, values;
  };
  std::vector<Layer> layers;
  int64_t tokens = 0;
};

/// A model's tensors, which it shares with its engine.
struct Weights {
  struct Block {
    torch::Tensor attn_c_attn;  // [(heads + 2·kv_heads)·head_dim, width]: Q, K, V
    torch::Tensor attn_c_proj;  // [width, width]
    torch::Tensor mlp_c_fc;     // [4·width, width]
    torch::Tensor mlp_c_proj;   // [width, 4·width]
  };
  torch::Tensor wte;  // [vocabulary, width], the head too
  std::vector<Block> blocks;
  torch::Tensor cos, sin;  // [context, head_dim / 2], fp32
};

class SimdStep;
class Profile;

/// Weights and the residual stream are fp32; `precision` is that of the matrix products, bf16 or fp32.
/// Parameters have the names of the paper's script, such as transformer.h.0.attn.c_attn.weight.
class Model : public torch::nn::Module {
 public:
  /// Every weight as a linear layer has it by default: uniform in ±1/√fan_in, from this seed.
  Model(const ModelShape& shape, torch::ScalarType precision, uint64_t seed);
  ~Model() override;

  const ModelShape& shape() const { return shape_; }
  void set_precision(torch::ScalarType precision) { precision_ = precision; }
  /// What computes losses and gradients: libtorch's operations and autograd (portable, the default), or one of our own
  /// engines (simd_step.h). Where that does not compute in the precision, portable does.
  void set_engine(Engine engine) { engine_ = engine; }

  /// Mean cross-entropy of `targets` given `tokens`, both [batch, tokens], in fp32, with libtorch.
  torch::Tensor loss(const torch::Tensor& tokens, const torch::Tensor& targets);

  /// The same, and its gradients, times `share` (not 0), are added to those of the weights; by the
  /// engine set. Our own keep bf16 copies of weights, and make them anew when a weight's version
  /// was raised, as every in-place operation does; what writes past autograd (`data()`) does not.
  double add_gradients(const torch::Tensor& tokens, const torch::Tensor& targets, double share);

  /// The same without gradients. Losses of tokens are summed in fp64.
  double evaluate(const torch::Tensor& tokens, const torch::Tensor& targets);

  /// Where the time of the last two went, since the beginning.
  Profile& profile() { return *profile_; }

  /// Logits after the last token of each row, [batch, vocabulary] in fp32. `tokens` follow those in
  /// the cache and are added to it: a prompt first, then one at a time.
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
