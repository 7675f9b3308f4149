// Trains one attention layer to copy the token three positions back. Run: ./minimal
#include <group_muon/group_muon.h>
#include <torch/torch.h>

#include <cstdio>

namespace nn = torch::nn;

constexpr int64_t kVocabulary = 32, kWidth = 96, kHeads = 12, kContext = 32;

struct TinyGpt : nn::Module {
  nn::Embedding wte = register_module("wte", nn::Embedding(kVocabulary, kWidth));
  nn::Embedding wpe = register_module("wpe", nn::Embedding(kContext, kWidth));
  nn::Linear c_attn = register_module("c_attn", nn::Linear(kWidth, 3 * kWidth));
  nn::Linear c_proj = register_module("c_proj", nn::Linear(kWidth, kWidth));
  nn::Linear lm_head = register_module("lm_head", nn::Linear(kWidth, kVocabulary));

  torch::Tensor forward(torch::Tensor tokens) {
    auto x = wte(tokens) + wpe(torch::arange(kContext));
    auto qkv =
        c_attn(x).view({-1, kContext, 3 * kHeads, kWidth / kHeads}).transpose(1, 2).chunk(3, 1);
    auto y =
        torch::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], {}, 0.0, /*is_causal=*/true);
    return lm_head(x + c_proj(y.transpose(1, 2).reshape({-1, kContext, kWidth})));
  }
};

int main() {
  torch::manual_seed(0);
  TinyGpt model;

  // Q and K in random groups of 6 heads, drawn at every step; V and the rest as in plain Muon.
  const auto random6 = group_muon::parse_schedule("6:random");
  group_muon::AssembleOptions options;
  options.muon.lr(2e-3);
  options.layouts = {
      {"c_attn.weight",
       group_muon::packed_qkv(
           {.heads = kHeads, .head_dim = kWidth / kHeads}, {.q = random6, .k = random6})}};
  auto optimizer = group_muon::assemble(model, options);

  for (int step = 0; step <= 200; ++step) {
    auto tokens = torch::randint(kVocabulary, {32, kContext});
    auto logits = model.forward(tokens).slice(1, 3);  // from position 3, predict the token 3 back
    auto loss = nn::functional::cross_entropy(
        logits.reshape({-1, kVocabulary}), tokens.slice(1, 0, kContext - 3).reshape(-1));
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    if (step % 50 == 0) std::printf("step %3d  loss %.4f\n", step, loss.item<double>());
  }
}
