#include "group_muon/balance.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "group_muon/blocks.h"

namespace group_muon {
namespace {

using at::Tensor;

constexpr int64_t kVectors = 8;
constexpr int kPowerIterations = 8;

// Numbers in [-1, 1) that look random and are the same everywhere: [n, vectors], fp32.
Tensor start_vectors(int64_t n, at::Device device) {
  constexpr double kGoldenRatio = 0.6180339887498949;
  const int64_t vectors = std::min(n, kVectors);
  const Tensor i = at::arange(1, n * vectors + 1, at::device(device).dtype(at::kDouble));
  return (at::frac(i * i * kGoldenRatio) * 2 - 1).to(at::kFloat).view({n, vectors});
}

Tensor one_where_zero(const Tensor& tensor) { return tensor.masked_fill(tensor == 0, 1); }

}  // namespace

Tensor with_balanced_rows(const Tensor& blocks, bool transposed) {
  const Tensor wide = at_least_fp32(blocks);
  const Tensor rows = (transposed ? wide.mT() : wide).contiguous();
  // Squares of small entries would underflow.
  const Tensor scaled = rows / one_where_zero(rows.abs().amax(-1, true));
  const Tensor balanced = scaled / one_where_zero(at::linalg_vector_norm(scaled, 2, {-1}, true));
  return transposed ? balanced.mT() : balanced;
}

Tensor spectral_norms(const Tensor& matrices) {
  const Tensor finite = matrices.isfinite().flatten(1).all(1);  // LAPACK rejects NaN
  const Tensor x = at::nan_to_num(matrices.to(at::kFloat), 0, 0, 0).contiguous();
  Tensor v = start_vectors(x.size(2), x.device()).expand({x.size(0), -1, -1});
  for (int i = 0; i < kPowerIterations; ++i) {
    v = at::bmm(x.mT(), at::bmm(x, v));
    v = v / one_where_zero(at::linalg_vector_norm(v, 2, {1}, true));
  }
  const auto [basis, rest] = at::linalg_qr(v);
  const Tensor largest = at::linalg_svdvals(at::bmm(x, basis)).amax(-1);
  return largest.masked_fill(~finite, std::numeric_limits<double>::quiet_NaN());
}

void match_spectral_norm(const Tensor& blocks, int64_t axis) {
  if (blocks.size(1) == 1) return;
  // One matrix after the other: products of a batch may depend on how many there are, and processes that share a stack
  // of matrices should get the bits of one.
  for (int64_t i = 0; i < blocks.size(0); ++i) {
    const Tensor own = blocks[i];
    const Tensor lying = (axis == 0 ? own : own.mT()).contiguous();
    const Tensor whole = spectral_norms(lying.flatten(0, 1).unsqueeze(0))[0];
    const Tensor ratio = (spectral_norms(lying).amax() / whole).clamp_max(1);
    const Tensor wide = at_least_fp32(own);
    own.copy_(wide * at::where(whole == 0, at::ones_like(ratio), ratio).to(wide.scalar_type()));
  }
}

}  // namespace group_muon
