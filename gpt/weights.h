#pragma once
// A GPT's sizes and tensors.

#include <torch/types.h>

#include <cstdint>
#include <vector>

namespace gpt {

struct ModelShape {
  int64_t layers = 12;
  int64_t heads = 12;
  int64_t kv_heads = 0;  // 0: same as heads
  int64_t width = 768;
  int64_t context = 1024;
  int64_t vocabulary = 50257;
  bool qk_norm = false;  // RMS norm of each query and key head, before rotary positions

  int64_t head_dim() const { return width / heads; }
  int64_t key_heads() const { return kv_heads == 0 ? heads : kv_heads; }
  bool operator==(const ModelShape&) const = default;
};

/// A model's tensors, shared with its engine.
struct Weights {
  struct Block {
    torch::Tensor attn_c_attn;  // [(heads + 2·kv_heads)·head_dim, width]: Q, K, V
    torch::Tensor attn_c_proj;  // [width, width]
    torch::Tensor mlp_c_fc;     // [4·width, width]
    torch::Tensor mlp_c_proj;   // [width, 4·width]
  };
  torch::Tensor wte;  // [vocabulary, width]; also the output head
  std::vector<Block> blocks;
  torch::Tensor cos, sin;  // [context, head_dim / 2], fp32
};

}  // namespace gpt
