#pragma once
// The elementwise work of a step on SIMD engines, in two passes over memory:
//   gradient, momentum → momentum, block, its norm        block, weight → weight

#include <c10/util/ArrayRef.h>
#include <c10/util/BFloat16.h>

#include <cstdint>

#include "group_muon/engine.h"

namespace group_muon {

/// How momentum is accumulated, and whether to look ahead; see StepOptions.
struct MomentumRule {
  float momentum = 0;
  bool nesterov = false;
  bool average = false;
};

/// The rows of a block in contiguous fp32 matrices with `cols` columns: row i of the block is matrix row rows[i].
struct RowMap {
  c10::ArrayRef<int64_t> rows;
  int64_t first_row = 0;  // added to each of `rows`
  int64_t cols = 0;
};

/// Updates these rows of momentum and writes the matrix to orthogonalize to `block`, row by row, as T: float, or bf16
/// if the engine computes in it. Returns the sum of its squares before rounding.
template <typename T>
double momentum_pass(
    Engine engine, const RowMap& map, const MomentumRule& rule, const float* grad, float* momentum,
    T* block);

/// weight ← decay·weight - step·block on these rows.
template <typename T>
void update_pass(
    Engine engine, const RowMap& map, float decay, float step, const T* block, float* weight);

}  // namespace group_muon
