#include "group_muon/engine_portable.h"

#include <ATen/ATen.h>

#include <cmath>

namespace group_muon {
namespace {

using at::Tensor;

// X: [B, short, long].
Tensor newton_schulz(Tensor x, const std::vector<Coefficients>& coefficients) {
  for (const auto& [a, b, c] : coefficients) {
    const Tensor gram = at::bmm(x, x.mT());
    const Tensor factor = at::baddbmm(gram, gram, gram, b, c);  // bA + cA²
    x = at::baddbmm(x, factor, x, a);
  }
  return x;
}

// The product of the factors (aI + bR + cR²) of some steps, starting from R = XXᵀ: [B, short, short]. R, Z and Q are
// always polynomials in the first R, so they are symmetric and commute.
Tensor gram_factor(
    Tensor r, std::vector<Coefficients>::const_iterator step,
    std::vector<Coefficients>::const_iterator end) {
  Tensor q;
  for (; step != end; ++step) {
    const auto& [a, b, c] = *step;
    const Tensor z = at::baddbmm(r, r, r, b, c);
    if (q.defined()) {
      q = at::baddbmm(q, q, z, a);
    } else {
      q = z.clone();
      q.diagonal(0, -2, -1).add_(a);
    }
    if (step + 1 == end) break;
    const Tensor rz = at::baddbmm(r, r, z, a);
    r = at::baddbmm(rz, z, rz, a);
  }
  return q;
}

Tensor gram_newton_schulz(Tensor x, const OrthogonalizeOptions& options) {
  auto bounds = portable_restarts(options);
  bounds.push_back(static_cast<int64_t>(options.coefficients.size()));
  auto begin = options.coefficients.begin();
  const bool wide = options.method == Method::kAccurateGram && x.scalar_type() == at::kBFloat16;
  for (const auto bound : bounds) {
    const auto end = options.coefficients.begin() + bound;
    const Tensor rows = wide ? x.to(at::kFloat) : x;
    const Tensor factor = gram_factor(at::bmm(rows, rows.mT()), begin, end);
    x = at::bmm(factor.to(x.scalar_type()), x);
    begin = end;
  }
  return x;
}

// U·Vᵀ over the singular values above the tolerance. LAPACK rejects NaN, so blocks that contain it bypass it.
Tensor polar_factor(const Tensor& x, double rank_tolerance) {
  const Tensor finite = x.isfinite().flatten(-2).all(-1).unsqueeze(-1).unsqueeze(-1);
  const auto [u, s, vh] = at::linalg_svd(at::where(finite, x, at::zeros({}, x.options())), false);
  const Tensor kept = (s > s.amax(-1, true) * rank_tolerance).to(x.scalar_type());
  const Tensor polar = at::bmm(u * kept.unsqueeze(-2), vh);
  return at::where(finite, polar, at::full({}, std::nan(""), x.options()));
}

// X: [B, short, long], in fp32 or fp64.
Tensor orthogonalize_wide(const Tensor& x, const OrthogonalizeOptions& options) {
  if (options.method == Method::kExact) {
    auto scaled = options;
    scaled.precision = svd_precision(options.precision);
    return polar_factor(normalized(x, scaled), options.rank_tolerance).to(options.precision);
  }
  const Tensor unit = normalized(x, options);
  return is_gram(options.method) ? gram_newton_schulz(unit, options)
                                 : newton_schulz(unit, options.coefficients);
}

}  // namespace

std::vector<int64_t> portable_restarts(const OrthogonalizeOptions& options) {
  if (!options.restarts.empty()) return options.restarts;
  const double limit = options.precision == at::kBFloat16 ? kTightCondition : kFloatCondition;
  return gram_restarts(options.coefficients, limit);
}

// Divides by the largest entry first, because squares of entries below 1e-19 underflow in fp32.
Tensor normalized(const Tensor& x, const OrthogonalizeOptions& options) {
  const Tensor largest = at::maximum(x.amax({-2, -1}, true), -x.amin({-2, -1}, true));  // [B, 1, 1]
  const Tensor one = at::ones({}, x.options());
  Tensor unit = x / at::where(largest == 0, one, largest);
  const Tensor norm = at::linalg_vector_norm(unit, 2, at::IntArrayRef{-2, -1}, true);
  const Tensor divisor =
      options.relative_eps ? norm * (1 + options.eps) : norm + options.eps / largest;
  return unit.div_(at::where(norm == 0, one, divisor)).to(options.precision);
}

Tensor orthogonalize_portable(const Tensor& x, const OrthogonalizeOptions& options) {
  const bool tall = x.size(1) > x.size(2);
  const Tensor result = orthogonalize_wide(tall ? x.mT() : x, options);
  return tall ? result.mT().contiguous() : result;
}

}  // namespace group_muon
