#pragma once
// The model's memory-bound operations and its attention on our own engines, each with its backward pass. T is the
// type of activations: bf16, float, or double (used to test the formulas). Sums and the residual stream have type
// Sum<T>.

#include <c10/util/BFloat16.h>

#include <cstdint>
#include <type_traits>

#include "group_muon/engine.h"
#include "group_muon/targets.h"

namespace gpt {

using group_muon::Engine;

template <typename T>
using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;

constexpr double kNormEps = 1e-6;

/// A row holds one token's queries (heads·head_dim), keys and values (kv_heads·head_dim each).
struct AttentionSizes {
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

/// An engine's functions. They run on all of torch's threads.
template <typename T>
struct Kernels {
  using S = Sum<T>;

  /// normal = x / rms(x), row by row; `inverse` is 1 / rms. x: [rows, cols].
  void (*rms_norm)(const S* x, T* normal, S* inverse, int64_t rows, int64_t cols) = nullptr;

  /// Gradient of a residual stream that also feeds a norm. Adds the norm's gradient to `stream_grad` (or overwrites
  /// it if `begin`) and writes the result times `scale` to `scaled_grad`, for the layer before.
  template <typename G>
  using RmsNormBackward = void (*)(
      const T* normal, const S* inverse, const G* normal_grad, S* stream_grad, bool begin,
      T* scaled_grad, S scale, int64_t rows, int64_t cols);
  RmsNormBackward<T> rms_norm_backward = nullptr;
  RmsNormBackward<S> rms_norm_backward_of_sums = nullptr;  // takes the norm's gradient in S

  /// out = x·Φ(x).
  void (*gelu)(const T* x, T* out, int64_t count) = nullptr;

  /// Recomputes `out` and turns the gradient with respect to `out` into the one with respect to x, in place.
  void (*gelu_backward)(const T* x, T* out, T* grad, int64_t count) = nullptr;

  /// Cross-entropy of each row of logits. If `scale` ≠ 0, logits are replaced by their gradients times `scale`.
  void (*cross_entropy)(
      T* logits, const int64_t* targets, double* losses, double scale, int64_t rows,
      int64_t cols) = nullptr;

  /// x[row] = table[token of row]
  void (*embed)(const S* table, const int64_t* tokens, S* x, int64_t rows, int64_t cols) = nullptr;

  /// table_grad[token of row] += x_grad[row], in row order for any number of threads.
  void (*embed_backward)(
      const S* x_grad, const int64_t* tokens, S* table_grad, int64_t rows, int64_t cols) = nullptr;
};

/// Causal attention with rotary positions. Each head is processed in tiles of queries that fit in cache. The full
/// score matrix is never stored; the backward pass recomputes it.
template <typename T>
struct AttentionKernels {
  using S = Sum<T>;

  /// Rotates queries and keys in `qkv` by their positions, in place. Writes the heads' outputs to `out`
  /// ([batch·tokens, width]) and each softmax's log-sum-exp to `log_sums` ([batch, heads, tokens]). Unless `inverses`
  /// is null, each query and key is divided by its RMS before it is rotated, and 1 / RMS is written to `inverses`
  /// ([batch, heads + kv_heads, tokens]).
  void (*forward)(
      const AttentionSizes& shape, const Rotary<S>& rotary, T* qkv, T* out, S* log_sums,
      S* inverses) = nullptr;

  /// Turns the gradient with respect to `out` into the one with respect to `qkv` before norms and rotation. `qkv`,
  /// `out`, `log_sums` and `inverses` are as forward() left them.
  void (*backward)(
      const AttentionSizes& shape, const Rotary<S>& rotary, const T* qkv, const T* out,
      const S* log_sums, const S* inverses, const T* out_grad, T* qkv_grad) = nullptr;
};

/// The kernels of an engine other than portable. For bf16, the engine must compute in it.
template <typename T>
const Kernels<T>& kernels_of(Engine engine);
template <typename T>
const AttentionKernels<T>& attention_of(Engine engine);

GROUP_MUON_FOR_TARGETS(GROUP_MUON_DECLARE_TABLE, kFloatKernels, Kernels<float>)
GROUP_MUON_FOR_TARGETS(GROUP_MUON_DECLARE_TABLE, kDoubleKernels, Kernels<double>)
GROUP_MUON_FOR_BF16_TARGETS(GROUP_MUON_DECLARE_TABLE, kBf16Kernels, Kernels<c10::BFloat16>)
GROUP_MUON_FOR_TARGETS(GROUP_MUON_DECLARE_TABLE, kFloatAttention, AttentionKernels<float>)
GROUP_MUON_FOR_TARGETS(GROUP_MUON_DECLARE_TABLE, kDoubleAttention, AttentionKernels<double>)
GROUP_MUON_FOR_BF16_TARGETS(
    GROUP_MUON_DECLARE_TABLE, kBf16Attention, AttentionKernels<c10::BFloat16>)

}  // namespace gpt
