#pragma once
// The elementwise work of a step in two passes over memory, by our own engines:
//   gradient, momentum → momentum, block, its norm        block, weight → weight

#include <c10/util/ArrayRef.h>
#include <c10/util/BFloat16.h>

#include <cstdint>

#include "group_muon/engine.h"

namespace group_muon {

/// How momentum is made and looked ahead with; see StepOptions.
struct MomentumRule {
  float momentum = 0;
  bool nesterov = false;
  bool average = false;
};

/// A block of contiguous fp32 matrices of `cols` columns: row i of the block is row rows[i] of the matrix.
struct RowMap {
  c10::ArrayRef<int64_t> rows;
  int64_t first_row = 0;  // added to all of them
  int64_t cols = 0;
};

/// Updates these rows of momentum and writes what is to be orthogonalized to `block`, row after row, in T: float, or
/// bf16 if the engine computes in it. Returns the sum of squares before they are rounded.
template <typename T>
double momentum_pass(
    Engine engine, const RowMap& map, const MomentumRule& rule, const float* grad, float* momentum,
    T* block);

/// weight ← decay·weight - step·block on these rows.
template <typename T>
void update_pass(
    Engine engine, const RowMap& map, float decay, float step, const T* block, float* weight);

}  // namespace group_muon
