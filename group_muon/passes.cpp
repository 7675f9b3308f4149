#include "group_muon/passes.h"

#include <numeric>
#include <vector>

#include "group_muon/parallel.h"
#include "group_muon/passes_kernel.h"

namespace group_muon {
namespace {

// Minimum number of elements per thread.
constexpr int64_t kGrain = 1 << 15;

template <typename Work>
void for_rows(const RowMap& map, Work&& work) {
  const auto count = static_cast<int64_t>(map.rows.size());
  share_out(count, kGrain / map.cols + 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      work(i, i * map.cols, (map.rows[i] + map.first_row) * map.cols);
    }
  });
}

template <typename T>
const PassKernels<T>& kernels_of(Engine engine);
GROUP_MUON_DEFINE_LOOKUP(GROUP_MUON_FOR_TARGETS, kernels_of, kFloatPasses, PassKernels<float>)
GROUP_MUON_DEFINE_LOOKUP(
    GROUP_MUON_FOR_BF16_TARGETS, kernels_of, kBf16Passes, PassKernels<c10::BFloat16>)

}  // namespace

template <typename T>
double momentum_pass(
    Engine engine, const RowMap& map, const MomentumRule& rule, const float* grad, float* momentum,
    T* block) {
  const auto& kernels = kernels_of<T>(engine);
  // Summed in row order, independent of the threads.
  std::vector<double> squares(map.rows.size());
  for_rows(map, [&](int64_t i, int64_t in_block, int64_t in_matrix) {
    squares[i] = kernels.momentum_row(
        map.cols, rule, grad + in_matrix, momentum + in_matrix, block + in_block);
  });
  return std::accumulate(squares.begin(), squares.end(), 0.0);
}

template <typename T>
void update_pass(
    Engine engine, const RowMap& map, float decay, float step, const T* block, float* weight) {
  const auto& kernels = kernels_of<T>(engine);
  for_rows(map, [&](int64_t, int64_t in_block, int64_t in_matrix) {
    kernels.update_row(map.cols, decay, step, block + in_block, weight + in_matrix);
  });
}

template double momentum_pass(
    Engine, const RowMap&, const MomentumRule&, const float*, float*, float*);
template double momentum_pass(
    Engine, const RowMap&, const MomentumRule&, const float*, float*, c10::BFloat16*);
template void update_pass(Engine, const RowMap&, float, float, const float*, float*);
template void update_pass(Engine, const RowMap&, float, float, const c10::BFloat16*, float*);

}  // namespace group_muon
