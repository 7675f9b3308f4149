#include "group_muon/passes_kernel.h"

#include <algorithm>

#include "group_muon/simd.h"

namespace group_muon::GROUP_MUON_TARGET {
namespace {

// from + weight·(to - from)
Vec lerp(const Vec& from, const Vec& to, const Vec& weight) {
  return at::vec::fmadd(to - from, weight, from);
}

// In fp64, whose range covers the squares of all fp32 numbers.
double sum_of_squares(const float* values, int64_t count) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) {
    const double value = values[i];
    sum += value * value;
  }
  return sum;
}

template <typename T>
double momentum_row(
    int64_t cols, const MomentumRule& rule, const float* grad, float* momentum, T* block) {
  constexpr int64_t kChunk = 8 * kLanes;  // keeps the unrounded look-ahead in cache
  const Vec mu(rule.momentum), rest(1 - rule.momentum);
  const bool nesterov = rule.nesterov, average = rule.average;
  float directions[kChunk];
  double sum = 0;
  for (int64_t begin = 0; begin < cols; begin += kChunk) {
    const int64_t end = std::min(begin + kChunk, cols);
    for (int64_t j = begin; j < end; j += kLanes) {
      const int64_t count = cols - j;
      const Vec g = load(grad + j, count);
      Vec m = load(momentum + j, count);
      m = average ? lerp(m, g, rest) : at::vec::fmadd(m, mu, g);
      store(momentum + j, count, m);
      const Vec direction = !nesterov ? m : average ? lerp(g, m, mu) : at::vec::fmadd(m, mu, g);
      store(block + j, count, direction);
      direction.store(directions + (j - begin));
    }
    sum += sum_of_squares(directions, end - begin);
  }
  return sum;
}

template <typename T>
void update_row(int64_t cols, float decay, float step, const T* block, float* weight) {
  const Vec keep(decay), factor(-step);
  for (int64_t j = 0; j < cols; j += kLanes) {
    const int64_t count = cols - j;
    const Vec kept = load(weight + j, count) * keep;
    store(weight + j, count, at::vec::fmadd(load(block + j, count), factor, kept));
  }
}

}  // namespace

constinit const PassKernels<float> kFloatPasses = {momentum_row<float>, update_row<float>};
#ifdef GROUP_MUON_TARGET_BF16
constinit const PassKernels<BFloat16> kBf16Passes = {momentum_row<BFloat16>, update_row<BFloat16>};
#endif

}  // namespace group_muon::GROUP_MUON_TARGET
