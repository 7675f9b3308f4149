#pragma once
// The model's memory-bound parts on the CPU, each one pass over memory, with its backward pass. T is the
// type of activations: bf16, float, or double (in which the formulas are checked). Sums and the residual
// stream are of type Sum<T>.

#include <c10/util/BFloat16.h>

#include <cstdint>
#include <type_traits>

namespace gpt {

template <typename T>
using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;

constexpr double kNormEps = 1e-6;

/// normal = x / rms(x), row by row; `inverse` is 1 / rms. x: [rows, cols].
template <typename T>
void rms_norm(const Sum<T>* x, T* normal, Sum<T>* inverse, int64_t rows, int64_t cols);

/// The gradient of a residual stream that also goes through a norm: adds the norm's part to
/// `stream_grad` (or begins it), and writes it, times `scale`, as what the layer before gets back.
template <typename T, typename G>
void rms_norm_backward(
    const T* normal, const Sum<T>* inverse, const G* normal_grad, Sum<T>* stream_grad, bool begin,
    T* scaled_grad, Sum<T> scale, int64_t rows, int64_t cols);

/// out = x·Φ(x).
template <typename T>
void gelu(const T* x, T* out, int64_t count);

/// Computes `out` again and turns the gradient by `out` into that by x, in place.
template <typename T>
void gelu_backward(const T* x, T* out, T* grad, int64_t count);

/// Cross-entropy of each row of logits. With `scale` ≠ 0 logits become their gradients, times that.
template <typename T>
void cross_entropy(
    T* logits, const int64_t* targets, double* losses, double scale, int64_t rows, int64_t cols);

/// x[row] = table[token of row]
template <typename T>
void embed(const T* table, const int64_t* tokens, T* x, int64_t rows, int64_t cols);

/// grad[token of row] += x_grad[row], in the order of rows whatever the number of threads.
template <typename T>
void embed_backward(
    const T* x_grad, const int64_t* tokens, T* table_grad, int64_t rows, int64_t cols);

}  // namespace gpt
