#pragma once
// The elementwise work of a step on the CPU, each part in one pass over memory:
//   gradient, momentum → momentum, block in bf16, its norm        block, weight → weight

#include <c10/util/BFloat16.h>

#include <cstdint>
#include <vector>

namespace group_muon {

/// How momentum is made and looked ahead with; see StepOptions.
struct MomentumRule {
  float momentum = 0;
  bool nesterov = false;
  bool average = false;
};

/// Rows of contiguous fp32 matrices of `cols` columns: row i of a block is row rows[i] of the matrix.
struct RowMap {
  const std::vector<int64_t>* rows = nullptr;
  int64_t first_row = 0;  // added to all of them
  int64_t cols = 0;
};

/// Updates these rows of momentum, writes what is to be orthogonalized to `blocks`, row after row, and
/// the sum of each row's squares to `squares`.
void momentum_pass(
    const RowMap& map, const MomentumRule& rule, const float* grad, float* momentum,
    c10::BFloat16* blocks, double* squares);

/// weight ← decay·weight - step·block on these rows.
void update_pass(
    const RowMap& map, float decay, float step, const c10::BFloat16* blocks, float* weight);

}  // namespace group_muon
