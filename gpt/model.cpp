#include "gpt/model.h"

#include <ATen/ATen.h>
#include <torch/nn/functional/activation.h>

#include <cmath>
#include <map>

#include "gpt/kernels.h"
#include "gpt/profile.h"
#include "gpt/simd_step.h"

namespace gpt {
namespace {

using torch::Tensor;

constexpr double kRotaryBase = 10000;

// Casts anything below fp32 to fp32.
Tensor widened(const Tensor& x) { return x.scalar_type() == at::kDouble ? x : x.to(at::kFloat); }

// RMS norm without a gain. Computes in at least fp32 and casts back.
Tensor rms_norm(const Tensor& x) {
  const Tensor wide = widened(x);
  const Tensor scale = at::rsqrt(wide.square().mean(-1, /*keepdim=*/true) + kNormEps);
  return (wide * scale).to(x.scalar_type());
}

// Modules by their paths. They only provide names: "transformer", "transformer.h", "transformer.h.0", …
using Modules = std::map<std::string, torch::nn::Module*>;

// The module with this path, added with its parents if missing.
torch::nn::Module& module_at(Modules& modules, const std::string& path) {
  auto& found = modules[path];
  if (found == nullptr) {
    const size_t dot = path.rfind('.');
    auto& parent = module_at(modules, dot == std::string::npos ? "" : path.substr(0, dot));
    const std::string name = path.substr(dot + 1);  // all of it, if there is no dot
    found = parent.register_module(name, std::make_shared<torch::nn::Module>()).get();
  }
  return *found;
}

}  // namespace

void check(const ModelShape& shape) {
  const auto positive = [](int64_t value, const char* name) {
    TORCH_CHECK_VALUE(value > 0, name, " should be 1 or more, not ", value);
  };
  positive(shape.layers, "layers");
  positive(shape.heads, "heads");
  positive(shape.width, "width");
  positive(shape.context, "context");
  positive(shape.vocabulary, "vocabulary");
  TORCH_CHECK_VALUE(
      shape.width % shape.heads == 0, "heads should divide width, but ", shape.heads,
      " heads do not divide a width of ", shape.width);
  TORCH_CHECK_VALUE(
      shape.head_dim() % 2 == 0, "head size should be even for rotary positions, but ", shape.width,
      " / ", shape.heads, " is ", shape.head_dim());
  TORCH_CHECK_VALUE(
      shape.kv_heads >= 0 && shape.heads % shape.key_heads() == 0,
      "kv_heads should divide heads, but ", shape.kv_heads, " does not divide ", shape.heads);
  TORCH_CHECK_VALUE(
      shape.vocabulary <= 65536, "vocabulary should be at most 65536 (tokens are 16 bits), not ",
      shape.vocabulary);
}

double training_flops_per_token(const ModelShape& shape) {
  const auto width = static_cast<double>(shape.width);
  const double qkv = static_cast<double>((shape.heads + 2 * shape.key_heads()) * shape.head_dim());
  const double weights = width * (qkv + width + 8 * width);  // per block: Q, K, V; projection; MLP
  const double attention = width * static_cast<double>(shape.context);  // QKᵀ and PV, half each
  const double forward = 2 * (static_cast<double>(shape.layers) * (weights + attention) +
                              width * static_cast<double>(shape.vocabulary));
  return 3 * forward;
}

Model::Model(const ModelShape& shape, torch::ScalarType precision, uint64_t seed)
    : shape_(shape), precision_(precision), profile_(std::make_unique<Profile>()) {
  check(shape);
  auto generator = at::detail::createCPUGenerator(seed);
  Modules modules = {{"", this}};
  const auto weight = [&](const std::string& path, int64_t out, int64_t in) {
    const double bound = 1 / std::sqrt(static_cast<double>(in));
    const Tensor value = at::empty({out, in}).uniform_(-bound, bound, generator);
    const size_t dot = path.rfind('.');
    return module_at(modules, path.substr(0, dot)).register_parameter(path.substr(dot + 1), value);
  };
  weights_.wte = weight("transformer.wte.weight", shape.vocabulary, shape.width);
  const int64_t qkv = (shape.heads + 2 * shape.key_heads()) * shape.head_dim();
  for (int64_t i = 0; i < shape.layers; ++i) {
    const std::string prefix = c10::str("transformer.h.", i, ".");
    weights_.blocks.push_back(
        {weight(prefix + "attn.c_attn.weight", qkv, shape.width),
         weight(prefix + "attn.c_proj.weight", shape.width, shape.width),
         weight(prefix + "mlp.c_fc.weight", 4 * shape.width, shape.width),
         weight(prefix + "mlp.c_proj.weight", shape.width, 4 * shape.width)});
  }
  const Tensor exponent =
      at::arange(0, shape.head_dim(), 2, at::kFloat) / static_cast<double>(shape.head_dim());
  const Tensor angles =
      at::outer(at::arange(shape.context, at::kFloat), 1 / at::pow(kRotaryBase, exponent));
  weights_.cos = register_buffer("rotary_cos", angles.cos());
  weights_.sin = register_buffer("rotary_sin", angles.sin());
}

Model::~Model() = default;

Tensor Model::product(const Tensor& x, const Tensor& weight) const {
  return at::linear(x.to(precision_), weight.to(precision_));
}

// Rotary positions. x: [batch, tokens, heads, head_dim]; each entry of a head's first half is paired with its second.
Tensor Model::rotated(const Tensor& x, int64_t first_position) const {
  const Tensor cos = weights_.cos.narrow(0, first_position, x.size(1)).unsqueeze(1);
  const Tensor sin = weights_.sin.narrow(0, first_position, x.size(1)).unsqueeze(1);
  const auto halves = x.chunk(2, -1);
  return at::cat({halves[0] * cos + halves[1] * sin, halves[1] * cos - halves[0] * sin}, -1)
      .to(x.scalar_type());
}

Tensor Model::attention(
    const Tensor& x, const Weights::Block& block, int64_t layer, KeyValueCache* cache) {
  const int64_t batch = x.size(0), tokens = x.size(1), size = shape_.head_dim();
  const int64_t seen = cache == nullptr ? 0 : cache->tokens;
  const int64_t key_rows = shape_.key_heads() * size;
  const auto parts =
      product(x, block.attn_c_attn).split_with_sizes({shape_.width, key_rows, key_rows}, -1);
  const auto heads = [&](const Tensor& part) { return part.view({batch, tokens, -1, size}); };
  const auto normed = [&](const Tensor& part) { return shape_.qk_norm ? rms_norm(part) : part; };
  const Tensor q = rotated(normed(heads(parts[0])), seen).transpose(1, 2);
  Tensor k = rotated(normed(heads(parts[1])), seen).transpose(1, 2);
  Tensor v = heads(parts[2]).transpose(1, 2);
  if (cache != nullptr) {
    const auto append = [&](Tensor& all, const Tensor& fresh) {
      if (!all.defined()) {
        all = at::empty({batch, fresh.size(1), shape_.context, size}, fresh.options());
      }
      all.narrow(2, seen, tokens).copy_(fresh);
      return all.narrow(2, 0, seen + tokens);
    };
    k = append(cache->layers[layer].keys, k);
    v = append(cache->layers[layer].values, v);
  }
  // With a cache, tokens after the prompt arrive one at a time and see everything before them.
  const bool causal = tokens > 1;
  const Tensor y = at::scaled_dot_product_attention(
      q, k, v, {}, 0.0, causal, std::nullopt, /*enable_gqa=*/shape_.key_heads() != shape_.heads);
  return product(y.transpose(1, 2).reshape({batch, tokens, shape_.width}), block.attn_c_proj);
}

Tensor Model::hidden(const Tensor& tokens, KeyValueCache* cache) {
  Tensor x = at::embedding(weights_.wte, tokens);
  const double attention_scale = 1 / std::sqrt(2.0 * static_cast<double>(shape_.layers));
  for (int64_t i = 0; i < shape_.layers; ++i) {
    const auto& block = weights_.blocks[i];
    x = x + attention(rms_norm(x), block, i, cache) * attention_scale;
    x = x + product(at::gelu(product(rms_norm(x), block.mlp_c_fc)), block.mlp_c_proj);
  }
  if (cache != nullptr) cache->tokens += tokens.size(1);
  return rms_norm(x);
}

Tensor Model::logits(const Tensor& tokens) {
  return widened(product(hidden(tokens, nullptr), weights_.wte)).flatten(0, 1);
}

Tensor Model::loss(const Tensor& tokens, const Tensor& targets) {
  return at::cross_entropy_loss(logits(tokens), targets.flatten());
}

double Model::add_gradients(const Tensor& tokens, const Tensor& targets, double share) {
  TORCH_CHECK_VALUE(share != 0, "share should not be 0");
  if (has_simd_step()) return simd_step().run(tokens, targets, share);
  const auto timed = Timed(*profile_, Part::kModel);
  const Tensor mean = loss(tokens, targets);
  (mean * share).backward();
  return mean.item<double>();
}

double Model::evaluate(const Tensor& tokens, const Tensor& targets) {
  if (has_simd_step()) return simd_step().run(tokens, targets, 0);
  const torch::NoGradGuard no_grad;
  const auto timed = Timed(*profile_, Part::kModel);
  const Tensor losses =
      at::cross_entropy_loss(logits(tokens), targets.flatten(), /*weight=*/{}, at::Reduction::None);
  return losses.to(at::kDouble).mean().item<double>();
}

bool Model::has_simd_step() const {
  const bool checked_in_fp64 = precision_ == at::kDouble;
  return engine_ != Engine::kPortable &&
         (checked_in_fp64 || group_muon::computes_in(engine_, precision_));
}

SimdStep& Model::simd_step() {
  auto& step = steps_[{engine_, precision_}];
  if (step == nullptr) step = make_simd_step(engine_, shape_, weights_, precision_, *profile_);
  return *step;
}

Tensor Model::next_logits(const Tensor& tokens, KeyValueCache& cache) {
  cache.layers.resize(shape_.layers);
  TORCH_CHECK_VALUE(
      cache.tokens + tokens.size(1) <= shape_.context, "the context of ", shape_.context,
      " tokens is full");
  TORCH_CHECK_VALUE(
      cache.tokens == 0 || tokens.size(1) == 1, "after the first call, pass one token at a time");
  const Tensor last = hidden(tokens, &cache).select(1, -1);
  return product(last, weights_.wte).to(at::kFloat);
}

}  // namespace gpt
