#include "group_muon/orthogonalize.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>

#include "group_muon/cpu_gram.h"

namespace group_muon {
namespace {

using at::Tensor;

constexpr Coefficients kConvergingTail{2.0, -1.5, 0.5};
// However well conditioned: without X, errors of the small matrices are not noticed.
constexpr size_t kLongestPhase = 3;
constexpr double kPolarExpressMargin = 1.01;
constexpr double kPolarExpressGramMargin = 1.05;

const std::vector<Coefficients>& named_list(std::string_view name) {
  static const std::vector<Coefficients> quintic = {{3.4445, -4.7750, 2.0315}};
  static const std::vector<Coefficients> you = {
      {4.0848, -6.8946, 2.9270},
      {3.9505, -6.3029, 2.6377},
      {3.7418, -5.5913, 2.3037},
      {2.8769, -3.1427, 1.2046},
      {2.8366, -3.0525, 1.2012}};
  static const std::vector<Coefficients> polar_express = {
      {8.28721201814563, -23.595886519098837, 17.300387312530933},
      {4.107059111542203, -2.9478499167379106, 0.5448431082926601},
      {3.9486908534822946, -2.908902115962949, 0.5518191394370137},
      {3.3184196573706015, -2.488488024314874, 0.51004894012372},
      {2.300652019954817, -1.6689039845747493, 0.4188073119525673}};
  if (name == "quintic") return quintic;
  if (name == "polar_express") return polar_express;
  if (name == "you") return you;
  TORCH_CHECK_VALUE(
      false, "group_muon: unknown coefficients '", name,
      "': use quintic, polar_express, you, or a list of (a, b, c)");
}

// The iteration for inputs a factor `margin` too large: p(x / margin).
Coefficients with_margin(const Coefficients& k, double margin) {
  return {k.a / margin, k.b / std::pow(margin, 3), k.c / std::pow(margin, 5)};
}

// Blocks of Frobenius norm 1 (a little less, by eps) in the working precision; zero stays zero.
// The largest entry is taken out first, since squares of entries below 1e-19 underflow in fp32.
Tensor normalized(const Tensor& x, const OrthogonalizeOptions& options) {
  const Tensor largest = at::maximum(x.amax({-2, -1}, true), -x.amin({-2, -1}, true));  // [B, 1, 1]
  const Tensor one = at::ones({}, x.options());
  Tensor unit = x / at::where(largest == 0, one, largest);
  const Tensor norm = at::linalg_vector_norm(unit, 2, at::IntArrayRef{-2, -1}, true);
  const Tensor divisor =
      options.relative_eps ? norm * (1 + options.eps) : norm + options.eps / largest;
  return unit.div_(at::where(norm == 0, one, divisor)).to(options.precision);
}

// X: [B, short, long].
Tensor newton_schulz(Tensor x, const std::vector<Coefficients>& coefficients) {
  for (const auto& [a, b, c] : coefficients) {
    const Tensor gram = at::bmm(x, x.mT());
    const Tensor factor = at::baddbmm(gram, gram, gram, b, c);  // bA + cA²
    x = at::baddbmm(x, factor, x, a);
  }
  return x;
}

// The product of the factors (aI + bR + cR²) of some steps, starting from R = XXᵀ: [B, short,
// short]. All of R, Z and Q are polynomials in R, so they are symmetric and commute.
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
  const double limit = x.scalar_type() == at::kBFloat16 ? kTightCondition : kLooseCondition;
  auto bounds =
      options.restarts.empty() ? gram_restarts(options.coefficients, limit) : options.restarts;
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

// X: [B, m, n] on a CPU with products of its own.
Tensor gram_on_cpu(const Tensor& x, const OrthogonalizeOptions& options) {
  const Tensor in = normalized(x, options).contiguous();
  Tensor out = at::empty_like(in);
  const auto* from = in.const_data_ptr<c10::BFloat16>();
  auto* to = out.data_ptr<c10::BFloat16>();
  const int64_t rows = x.size(1), cols = x.size(2);
  std::vector<GramBlock> blocks;
  for (int64_t i = 0; i < x.size(0); ++i) {
    const int64_t size = rows * cols, offset = i * size;
    blocks.push_back(
        {.rows = rows,
         .cols = cols,
         .load =
             [=](c10::BFloat16* block) {
               std::copy_n(from + offset, size, block);
               return 1.0F;
             },
         .store = [=](const c10::BFloat16* block) { std::copy_n(block, size, to + offset); }});
  }
  cpu_gram(blocks, options);
  return out;
}

// SVD has no bf16, and needs none: it is not the fast path.
c10::ScalarType svd_precision(c10::ScalarType precision) {
  return precision == at::kDouble ? at::kDouble : at::kFloat;
}

// U·Vᵀ over the singular values above the cut-off. LAPACK refuses NaN, so such blocks go round it.
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

std::vector<Coefficients> coefficient_list(
    std::string_view name, int64_t steps, int64_t tail_steps, Method method) {
  TORCH_CHECK_VALUE(
      steps >= 0 && tail_steps >= 0 && steps + tail_steps <= 100,
      "group_muon: steps and tail_steps should be 0 or more, and 100 together at most, not ", steps,
      " and ", tail_steps);
  const auto& list = named_list(name);
  const double margin = name != "polar_express" ? 1.0
                        : may_be_gram(method)   ? kPolarExpressGramMargin
                                                : kPolarExpressMargin;
  std::vector<Coefficients> coefficients;
  for (int64_t i = 0; i < steps; ++i) {
    coefficients.push_back(with_margin(list[std::min<size_t>(i, list.size() - 1)], margin));
  }
  return with_tail(std::move(coefficients), tail_steps);
}

std::vector<Coefficients> with_tail(std::vector<Coefficients> coefficients, int64_t tail_steps) {
  coefficients.insert(coefficients.end(), tail_steps, kConvergingTail);
  return coefficients;
}

std::vector<int64_t> gram_restarts(const std::vector<Coefficients>& coefficients, double limit) {
  // The factor Q accumulated from one start to the next has eigenvalues q(x), x the singular values of
  // X in [0, 1]. Follow a grid of them through all steps: products[i][k] is that of the first k factors.
  constexpr int kGrid = 100;
  const size_t total = coefficients.size();
  std::vector<std::vector<double>> products;
  for (int i = 0; i < kGrid; ++i) {
    double x = std::pow(10, -4.0 * i / kGrid);
    auto& product = products.emplace_back(total + 1, 1);
    for (size_t step = 0; step < total; ++step) {
      const auto& [a, b, c] = coefficients[step];
      const double factor = a + b * x * x + c * std::pow(x, 4);
      product[step + 1] = product[step] * std::abs(factor);
      x *= factor;
    }
  }
  const auto condition = [&](size_t begin, size_t end) {
    if (end - begin > kLongestPhase) return std::numeric_limits<double>::infinity();
    double smallest = std::numeric_limits<double>::infinity(), largest = 0;
    for (const auto& product : products) {
      smallest = std::min(smallest, product[end] / product[begin]);
      largest = std::max(largest, product[end] / product[begin]);
    }
    return largest / smallest;
  };
  // For the first k steps: the restarts with the smallest worst condition, among those with that the smallest sum.
  struct Choice {
    double worst = 0;
    double sum = 0;
    std::vector<int64_t> restarts = {};
  };
  std::vector<Choice> choices(total + 1);
  for (size_t end = 1; end <= total; ++end) {
    const double only = condition(0, end);
    choices[end] = {only, only};
  }
  // Allow one restart more, until that is enough or does not help.
  for (size_t count = 1; count < total && choices[total].worst > limit; ++count) {
    auto better = choices;
    for (size_t begin = 1; begin < total; ++begin) {
      for (size_t end = begin + 1; end <= total; ++end) {
        const double last = condition(begin, end);
        const double worst = std::max(choices[begin].worst, last), sum = choices[begin].sum + last;
        if (std::tie(worst, sum) >= std::tie(better[end].worst, better[end].sum)) continue;
        better[end] = {worst, sum, choices[begin].restarts};
        better[end].restarts.push_back(static_cast<int64_t>(begin));
      }
    }
    if (better[total].worst == choices[total].worst && std::isfinite(better[total].worst)) break;
    choices = std::move(better);
  }
  return choices[total].restarts;
}

double default_rank_tolerance(c10::ScalarType data, c10::ScalarType precision, int64_t long_side) {
  const auto epsilon = [](c10::ScalarType type) {
    switch (type) {
      case at::kDouble:
        return std::numeric_limits<double>::epsilon();
      case at::kBFloat16:
        return static_cast<double>(std::numeric_limits<c10::BFloat16>::epsilon());
      case at::kHalf:
        return static_cast<double>(std::numeric_limits<c10::Half>::epsilon());
      default:
        return static_cast<double>(std::numeric_limits<float>::epsilon());
    }
  };
  return std::max(
      static_cast<double>(long_side) * epsilon(svd_precision(precision)), epsilon(data));
}

OrthogonalizeOptions with_rank_tolerance(
    OrthogonalizeOptions options, c10::ScalarType data, int64_t long_side) {
  if (options.rank_tolerance == 0) {
    options.rank_tolerance = default_rank_tolerance(data, options.precision, long_side);
  }
  return options;
}

Tensor orthogonalize(const Tensor& blocks, const OrthogonalizeOptions& options) {
  check(options);
  TORCH_CHECK_VALUE(
      blocks.dim() >= 2, "group_muon: orthogonalize needs matrices, not a tensor of shape ",
      blocks.sizes());
  TORCH_CHECK_TYPE(
      blocks.is_floating_point() && blocks.layout() == at::kStrided,
      "group_muon: orthogonalize needs dense floating-point blocks, not ", blocks.scalar_type(),
      " (", blocks.layout(), ")");
  const int64_t rows = blocks.size(-2);
  const int64_t cols = blocks.size(-1);
  if (blocks.numel() == 0) return blocks.to(options.precision);
  // fp32 at least, until the blocks are normalized.
  Tensor x = blocks.reshape({-1, rows, cols});
  x = x.to(
      options.precision == at::kDouble || x.scalar_type() == at::kDouble ? at::kDouble
                                                                         : at::kFloat);
  const auto complete = with_rank_tolerance(options, blocks.scalar_type(), std::max(rows, cols));
  if (x.is_cpu() && can_use_cpu_gram(complete))
    return gram_on_cpu(x, complete).view(blocks.sizes());
  const bool tall = rows > cols;
  const Tensor result = orthogonalize_wide(tall ? x.mT() : x, complete);
  return (tall ? result.mT().contiguous() : result).view(blocks.sizes());
}

Method parse_method(std::string_view name) {
  if (name == "auto") return Method::kAuto;
  if (name == "newton_schulz") return Method::kNewtonSchulz;
  if (name == "gram") return Method::kGram;
  if (name == "accurate_gram") return Method::kAccurateGram;
  if (name == "exact") return Method::kExact;
  TORCH_CHECK_VALUE(
      false, "group_muon: unknown method '", name,
      "': use auto, newton_schulz, gram, accurate_gram or exact");
}

c10::ScalarType parse_precision(std::string_view name) {
  if (name == "bfloat16") return at::kBFloat16;
  if (name == "float32") return at::kFloat;
  if (name == "float64") return at::kDouble;
  TORCH_CHECK_VALUE(
      false, "group_muon: unknown precision '", name, "': use bfloat16, float32 or float64");
}

void check(const OrthogonalizeOptions& options) {
  TORCH_CHECK_VALUE(
      options.precision == at::kBFloat16 || options.precision == at::kFloat ||
          options.precision == at::kDouble,
      "group_muon: precision should be bfloat16, float32 or float64, not ", options.precision);
  TORCH_CHECK_VALUE(options.eps >= 0, "group_muon: eps should be 0 or more, not ", options.eps);
  TORCH_CHECK_VALUE(
      options.rank_tolerance >= 0 && options.rank_tolerance < 1,
      "group_muon: rank_tolerance should be in [0, 1), not ", options.rank_tolerance);
  TORCH_CHECK_VALUE(
      options.method == Method::kExact || !options.coefficients.empty(),
      "group_muon: an iteration needs at least one step");
  TORCH_CHECK_VALUE(
      options.restarts.empty() || may_be_gram(options.method),
      "group_muon: restarts are for the methods gram, accurate_gram and auto only");
  int64_t previous = 0;
  for (const auto restart : options.restarts) {
    TORCH_CHECK_VALUE(
        restart > previous && restart < static_cast<int64_t>(options.coefficients.size()),
        "group_muon: restarts should rise and lie between 1 and ", options.coefficients.size() - 1,
        " for ", options.coefficients.size(), " steps, but one is ", restart);
    previous = restart;
  }
}

}  // namespace group_muon
