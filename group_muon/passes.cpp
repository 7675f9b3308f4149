#include "group_muon/passes.h"

#include <ATen/Parallel.h>

#include <numeric>
#include <vector>

#include "group_muon/avx512.h"

namespace group_muon {
namespace {

// Rows of so many elements together are worth a thread's while.
constexpr int64_t kGrain = 1 << 15;

template <typename Work>
void for_rows(const RowMap& map, Work&& work) {
  const auto count = static_cast<int64_t>(map.rows.size());
  at::parallel_for(0, count, kGrain / map.cols + 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      work(i, i * map.cols, (map.rows[i] + map.first_row) * map.cols);
    }
  });
}

#ifdef GROUP_MUON_AVX512
GROUP_MUON_AVX512_BEGIN

// from + weight·(to - from)
__m512 lerp(__m512 from, __m512 to, __m512 weight) {
  return _mm512_fmadd_ps(_mm512_sub_ps(to, from), weight, from);
}

// One row; returns the sum of squares. In fp64, which has room for the squares of all normal fp32 numbers (bf16 takes
// smaller ones for 0).
double momentum_row(
    int64_t cols, const MomentumRule& rule, const float* grad, float* momentum,
    c10::BFloat16* block) {
  const __m512 mu = _mm512_set1_ps(rule.momentum), rest = _mm512_set1_ps(1 - rule.momentum);
  __m512d sums[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
  for (int64_t j = 0; j < cols; j += 16) {
    const __mmask16 lanes = first_lanes(cols - j);
    const __m512 g = load(lanes, grad + j);
    __m512 m = load(lanes, momentum + j);
    m = rule.average ? lerp(m, g, rest) : _mm512_fmadd_ps(m, mu, g);
    store(lanes, momentum + j, m);
    const __m512 direction = !rule.nesterov ? m
                             : rule.average ? lerp(g, m, mu)
                                            : _mm512_fmadd_ps(m, mu, g);
    store(lanes, block + j, direction);
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(direction));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(direction, 1));
    sums[0] = _mm512_fmadd_pd(low, low, sums[0]);
    sums[1] = _mm512_fmadd_pd(high, high, sums[1]);
  }
  return _mm512_reduce_add_pd(_mm512_add_pd(sums[0], sums[1]));
}

void update_row(int64_t cols, float decay, float step, const c10::BFloat16* block, float* weight) {
  const __m512 keep = _mm512_set1_ps(decay), factor = _mm512_set1_ps(step);
  for (int64_t j = 0; j < cols; j += 16) {
    const __mmask16 lanes = first_lanes(cols - j);
    const __m512 update = load(lanes, block + j);
    const __m512 kept = _mm512_mul_ps(load(lanes, weight + j), keep);
    store(lanes, weight + j, _mm512_fnmadd_ps(update, factor, kept));
  }
}

GROUP_MUON_AVX512_END
#else

double momentum_row(int64_t, const MomentumRule&, const float*, float*, c10::BFloat16*) {
  return 0;
}
void update_row(int64_t, float, float, const c10::BFloat16*, float*) {}

#endif

}  // namespace

double momentum_pass(
    const RowMap& map, const MomentumRule& rule, const float* grad, float* momentum,
    c10::BFloat16* block) {
  std::vector<double> squares(
      map.rows.size());  // summed in the order of rows, whatever the threads
  for_rows(map, [&](int64_t i, int64_t in_block, int64_t in_matrix) {
    squares[i] =
        momentum_row(map.cols, rule, grad + in_matrix, momentum + in_matrix, block + in_block);
  });
  return std::accumulate(squares.begin(), squares.end(), 0.0);
}

void update_pass(
    const RowMap& map, float decay, float step, const c10::BFloat16* block, float* weight) {
  for_rows(map, [&](int64_t, int64_t in_block, int64_t in_matrix) {
    update_row(map.cols, decay, step, block + in_block, weight + in_matrix);
  });
}

}  // namespace group_muon
