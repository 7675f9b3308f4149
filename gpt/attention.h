#pragma once
// Causal attention with rotary positions on the CPU: heads are worked on one by one, by tiles of queries
// small enough for the cache; scores are never held whole, and computed anew in the backward pass.

#include <cstdint>

#include "gpt/kernels.h"

namespace gpt {

/// Queries, keys and values of a token lie in one row: heads·size, then kv_heads·size twice.
struct AttentionShape {
  int64_t batch = 0;
  int64_t tokens = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;

  int64_t width() const { return heads * head_dim; }
  int64_t row() const { return (heads + 2 * kv_heads) * head_dim; }
};

/// cos and sin: [tokens, head_dim / 2].
template <typename S>
struct Rotary {
  const S* cos = nullptr;
  const S* sin = nullptr;
};

/// Turns queries and keys in `qkv` by their positions, in place, and writes what heads see to `out`
/// ([batch·tokens, width]) and the logarithm of each softmax's sum to `log_sums` ([batch, heads,
/// tokens]).
template <typename T>
void attention(
    const AttentionShape& shape, const Rotary<Sum<T>>& rotary, T* qkv, T* out, Sum<T>* log_sums);

/// From the gradient by `out` that by `qkv` as it was before it was turned. `qkv`, `out` and `log_sums`
/// are what attention() left.
template <typename T>
void attention_backward(
    const AttentionShape& shape, const Rotary<Sum<T>>& rotary, const T* qkv, const T* out,
    const Sum<T>* log_sums, const T* out_grad, T* qkv_grad);

}  // namespace gpt
