#include <algorithm>
#include <cmath>

#include "gpt/kernels.h"
#include "gpt/vector_math.h"
#include "group_muon/parallel.h"

namespace gpt::GROUP_MUON_TARGET {
namespace {

using group_muon::share_out;

// Minimum number of elements per thread.
constexpr int64_t kGrain = 1 << 14;

template <typename Work>
void for_rows(int64_t rows, int64_t cols, Work&& work) {
  share_out(rows, kGrain / cols + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) work(row);
  });
}

template <typename T>
void rms_norm(const Sum<T>* x, T* normal, Sum<T>* inverse, int64_t rows, int64_t cols) {
  using S = Sum<T>;
  for_rows(rows, cols, [&](int64_t row) {
    const S* from = x + row * cols;
    T* to = normal + row * cols;
    S squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t j = 0; j < cols; ++j) squares += from[j] * from[j];
    const S factor = 1 / std::sqrt(squares / static_cast<S>(cols) + static_cast<S>(kNormEps));
    inverse[row] = factor;
    for (int64_t j = 0; j < cols; ++j) to[j] = static_cast<T>(from[j] * factor);
  });
}

template <typename T, typename G>
void rms_norm_backward(
    const T* normal, const Sum<T>* inverse, const G* normal_grad, Sum<T>* stream_grad, bool begin,
    T* scaled_grad, Sum<T> scale, int64_t rows, int64_t cols) {
  using S = Sum<T>;
  for_rows(rows, cols, [&](int64_t row) {
    const T* n = normal + row * cols;
    const G* g = normal_grad + row * cols;
    S* stream = stream_grad + row * cols;
    T* scaled = scaled_grad + row * cols;
    S dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t j = 0; j < cols; ++j) dot += static_cast<S>(n[j]) * static_cast<S>(g[j]);
    const S mean = dot / static_cast<S>(cols), factor = inverse[row];
    const S keep = begin ? S{0} : S{1};
    if (begin) std::fill_n(stream, cols, S{0});  // it may hold NaN, which 0 · stream would keep
    for (int64_t j = 0; j < cols; ++j) {
      const S value =
          keep * stream[j] + factor * (static_cast<S>(g[j]) - static_cast<S>(n[j]) * mean);
      stream[j] = value;
      scaled[j] = static_cast<T>(value * scale);
    }
  });
}

template <typename T>
void gelu(const T* x, T* out, int64_t count) {
  using S = Sum<T>;
  share_out(count, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const S value = static_cast<S>(x[i]);
      out[i] = static_cast<T>(value * gpt::normal(value).distribution);
    }
  });
}

template <typename T>
void gelu_backward(const T* x, T* out, T* grad, int64_t count) {
  using S = Sum<T>;
  share_out(count, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const S value = static_cast<S>(x[i]);
      const auto [distribution, density] = gpt::normal(value);
      out[i] = static_cast<T>(value * distribution);
      grad[i] = static_cast<T>(static_cast<S>(grad[i]) * (distribution + value * density));
    }
  });
}

template <typename T>
void cross_entropy(
    T* logits, const int64_t* targets, double* losses, double scale, int64_t rows, int64_t cols) {
  using S = Sum<T>;
  for_rows(rows, cols, [&](int64_t row) {
    T* logit = logits + row * cols;
    S largest = static_cast<S>(logit[0]);
#pragma omp simd reduction(max : largest)
    for (int64_t j = 0; j < cols; ++j) {
      largest = static_cast<S>(logit[j]) > largest ? static_cast<S>(logit[j]) : largest;
    }
    // Keep the exponentials if T can store them without rounding.
    const bool keep = std::is_same_v<T, S> && scale != 0;
    const auto wanted = static_cast<S>(logit[targets[row]]);
    S sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < cols; ++j) {
      const S power = vector_exp(static_cast<S>(logit[j]) - largest);
      logit[j] = keep ? static_cast<T>(power) : logit[j];
      sum += power;
    }
    losses[row] = std::log(static_cast<double>(sum)) + static_cast<double>(largest - wanted);
    if (scale == 0) return;
    const S factor = static_cast<S>(scale) / sum;
    for (int64_t j = 0; j < cols; ++j) {
      const auto value = static_cast<S>(logit[j]);
      logit[j] = static_cast<T>((keep ? value : vector_exp(value - largest)) * factor);
    }
    const S probability = vector_exp(wanted - largest) / sum;
    logit[targets[row]] = static_cast<T>((probability - 1) * static_cast<S>(scale));
  });
}

template <typename T>
void embed(const T* table, const int64_t* tokens, T* x, int64_t rows, int64_t cols) {
  for_rows(rows, cols, [&](int64_t row) {
    std::copy_n(table + tokens[row] * cols, cols, x + row * cols);
  });
}

template <typename T>
void embed_backward(
    const T* x_grad, const int64_t* tokens, T* table_grad, int64_t rows, int64_t cols) {
  // Each thread takes its own columns, so no two write to the same place.
  share_out(cols, kGrain / rows + 16, [&](int64_t begin, int64_t end) {
    for (int64_t row = 0; row < rows; ++row) {
      const T* from = x_grad + row * cols;
      T* to = table_grad + tokens[row] * cols;
      for (int64_t j = begin; j < end; ++j) to[j] += from[j];
    }
  });
}

template <typename T>
constexpr Kernels<T> table() noexcept {
  return {
      .rms_norm = rms_norm<T>,
      .rms_norm_backward = rms_norm_backward<T, T>,
      .rms_norm_backward_of_sums = rms_norm_backward<T, Sum<T>>,
      .gelu = gelu<T>,
      .gelu_backward = gelu_backward<T>,
      .cross_entropy = cross_entropy<T>,
      .embed = embed<Sum<T>>,
      .embed_backward = embed_backward<Sum<T>>};
}

}  // namespace

constinit const Kernels<float> kFloatKernels = table<float>();
constinit const Kernels<double> kDoubleKernels = table<double>();
#ifdef GROUP_MUON_TARGET_BF16
constinit const Kernels<c10::BFloat16> kBf16Kernels = table<c10::BFloat16>();
#endif

}  // namespace gpt::GROUP_MUON_TARGET
