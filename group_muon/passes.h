#pragma once
// The elementwise work of a step on the CPU, each part in one pass over memory:
//   gradient, momentum → momentum, block in bf16, its norm        block, weight → weight

#include <c10/util/ArrayRef.h>
#include <c10/util/BFloat16.h>

#include <cstdint>

namespace group_muon {

/// How momentum is made and looked ahead with; see StepOptions.
struct MomentumRule {
  float momentum = 0;
  bool nesterov = false;
  bool average = false;
};

/// Rows of contiguous fp32 matrices of `cols` columns: row i of a block is row rows[i] of the matrix.
struct RowMap {
  c10::ArrayRef<int64_t> rows;
  int64_t first_row = 0;  // added to all of them
  int64_t cols = 0;
};

/// Updates these rows of momentum and writes what is to be orthogonalized to `block`, row after row.
/// Returns the sum of its squares before they are rounded to bf16.
double momentum_pass(
    const RowMap& map, const MomentumRule& rule, const float* grad, float* momentum,
    c10::BFloat16* block);

/// weight ← decay·weight - step·block on these rows.
void update_pass(
    const RowMap& map, float decay, float step, const c10::BFloat16* block, float* weight);

}  // namespace group_muon
