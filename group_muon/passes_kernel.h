#pragma once
// What each SIMD engine implements for the passes: the work on one row.

#include "group_muon/passes.h"
#include "group_muon/targets.h"

namespace group_muon {

template <typename T>
struct PassKernels {
  /// Returns the sum of the squares.
  double (*momentum_row)(
      int64_t cols, const MomentumRule& rule, const float* grad, float* momentum,
      T* block) = nullptr;
  void (*update_row)(int64_t cols, float decay, float step, const T* block, float* weight) =
      nullptr;
};

GROUP_MUON_FOR_TARGETS(GROUP_MUON_DECLARE_TABLE, kFloatPasses, PassKernels<float>)
GROUP_MUON_FOR_BF16_TARGETS(GROUP_MUON_DECLARE_TABLE, kBf16Passes, PassKernels<c10::BFloat16>)

}  // namespace group_muon
