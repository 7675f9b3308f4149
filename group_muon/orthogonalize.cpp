#include "group_muon/orthogonalize.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "group_muon/engine_portable.h"
#include "group_muon/engine_simd.h"

namespace group_muon {

at::Tensor orthogonalize(const at::Tensor& blocks, const OrthogonalizeOptions& given) {
  check(given);
  TORCH_CHECK_VALUE(
      blocks.dim() >= 2, "group_muon: orthogonalize needs matrices, not a tensor of shape ",
      blocks.sizes());
  TORCH_CHECK_TYPE(
      blocks.is_floating_point() && blocks.layout() == at::kStrided,
      "group_muon: orthogonalize needs dense floating-point blocks, not ", blocks.scalar_type(),
      " (", blocks.layout(), ")");
  const int64_t rows = blocks.size(-2);
  const int64_t cols = blocks.size(-1);
  const auto options = with_rank_tolerance(
      resolved(given, blocks.device()), blocks.scalar_type(), std::max(rows, cols));
  if (blocks.numel() == 0) return blocks.to(options.precision);
  // At least fp32 until the blocks are normalized.
  at::Tensor x = blocks.reshape({-1, rows, cols});
  x = x.to(
      options.precision == at::kDouble || x.scalar_type() == at::kDouble ? at::kDouble
                                                                         : at::kFloat);
  const auto result = options.engine == Engine::kPortable ? orthogonalize_portable(x, options)
                                                          : orthogonalize_simd(x, options);
  return result.view(blocks.sizes());
}

}  // namespace group_muon
