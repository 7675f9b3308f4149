#include "group_muon/iteration.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>

namespace group_muon {
namespace {

constexpr Coefficients kConvergingTail{2.0, -1.5, 0.5};
// Most steps without a restart, however well conditioned: without X, errors of the small matrices go unnoticed.
constexpr size_t kLongestPhase = 3;
constexpr double kPolarExpressMargin = 1.01;
// How much too large a value may become by rounding in a Gram method.
constexpr double kGramMargin = 1.05;

const std::vector<Coefficients>& named_list(std::string_view name) {
  static const std::vector<Coefficients> quintic = {{3.4445, -4.7750, 2.0315}};
  static const std::vector<Coefficients> you_jiacheng = {
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
      {2.300652019954817, -1.6689039845747493, 0.4188073119525673},
      {1.891301407787398, -1.2679958271945868, 0.37680408948524835},
      {1.8750014808534479, -1.2500016453999487, 0.3750001645474248},
      {1.875, -1.25, 0.375}};
  if (name == "quintic") return quintic;
  if (name == "polar_express") return polar_express;
  if (name == "you_jiacheng" || name == "you") return you_jiacheng;  // "you" is its old name
  TORCH_CHECK_VALUE(
      false, "group_muon: unknown coefficients '", name,
      "': use quintic, polar_express, you_jiacheng, or a list of (a, b, c)");
}

// Whether p(1) = 1 and p'(1) = 0. Such a step pulls values to 1 from both sides and needs no margin.
bool converges(const Coefficients& k) {
  constexpr double kRounding = 1e-9;
  return std::abs(k.a + k.b + k.c - 1) < kRounding && std::abs(k.a + 3 * k.b + 5 * k.c) < kRounding;
}

// The steps p(x / margin), for inputs that are up to a factor `margin` too large.
std::vector<Coefficients> with_margin(std::vector<Coefficients> list, double margin) {
  for (auto& k : list) {
    if (converges(k)) continue;
    k = {k.a / margin, k.b / std::pow(margin, 3), k.c / std::pow(margin, 5)};
  }
  return list;
}

// The largest |p(x)| for x in [0, bound].
double largest_output(const Coefficients& k, double bound) {
  const auto value = [&](double x) { return std::abs(x * (k.a + x * x * (k.b + x * x * k.c))); };
  double largest = value(bound);
  const auto try_square = [&](double square) {  // p' = a + 3b·x² + 5c·x⁴ is 0 there
    if (square > 0 && square < bound * bound) largest = std::max(largest, value(std::sqrt(square)));
  };
  if (k.c == 0) {
    if (k.b != 0) try_square(-k.a / (3 * k.b));
  } else if (const double root = 9 * k.b * k.b - 20 * k.a * k.c; root >= 0) {
    try_square((-3 * k.b + std::sqrt(root)) / (10 * k.c));
    try_square((-3 * k.b - std::sqrt(root)) / (10 * k.c));
  }
  return largest;
}

// Whether the results stay within 10% of their bound if the values before any one step are a factor `excess` too large.
bool tolerates(const std::vector<Coefficients>& list, double excess) {
  std::vector<double> bounds = {1};  // before each step, and after the last
  for (const auto& k : list) bounds.push_back(largest_output(k, bounds.back()));
  for (size_t first = 0; first < list.size(); ++first) {
    double bound = bounds[first] * excess;
    for (size_t i = first; i < list.size(); ++i) bound = largest_output(list[i], bound);
    if (!(bound <= 1.1 * bounds.back())) return false;
  }
  return true;
}

}  // namespace

std::vector<Coefficients> coefficient_list(
    std::string_view name, int64_t steps, int64_t tail_steps, Method method) {
  TORCH_CHECK_VALUE(
      steps >= 0 && tail_steps >= 0 && steps + tail_steps <= 100,
      "group_muon: steps and tail_steps should be 0 or more, and together at most 100, not ", steps,
      " and ", tail_steps);
  const auto& list = named_list(name);
  std::vector<Coefficients> coefficients;
  for (int64_t i = 0; i < steps; ++i) {
    coefficients.push_back(list[std::min<size_t>(i, list.size() - 1)]);
  }
  if (name == "polar_express") {
    coefficients =
        with_margin(std::move(coefficients), is_gram(method) ? kGramMargin : kPolarExpressMargin);
  }
  return with_tail(std::move(coefficients), tail_steps);
}

std::vector<Coefficients> with_gram_margin(const std::vector<Coefficients>& coefficients) {
  constexpr int kChoices = 50;
  for (int i = 0; i <= kChoices; ++i) {
    auto list = with_margin(coefficients, 1 + i * (kGramMargin - 1) / kChoices);
    if (tolerates(list, kGramMargin)) return list;
  }
  return coefficients;  // no margin helps
}

std::vector<Coefficients> with_tail(std::vector<Coefficients> coefficients, int64_t tail_steps) {
  coefficients.insert(coefficients.end(), tail_steps, kConvergingTail);
  return coefficients;
}

std::vector<int64_t> gram_restarts(const std::vector<Coefficients>& coefficients, double limit) {
  // The factor Q accumulated between two restarts has eigenvalues q(x), where x in [0, 1] are the singular values
  // of X. Follow a grid of x through all steps: products[i][k] is the product of the first k factors.
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
  // For the first k steps: the restarts with the smallest worst condition number and, among those, the smallest sum.
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
  // Allow one more restart until that is enough or does not help.
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

c10::ScalarType svd_precision(c10::ScalarType precision) {
  return precision == at::kDouble ? at::kDouble : at::kFloat;
}

double default_rank_tolerance(c10::ScalarType data, c10::ScalarType precision, int64_t long_side) {
  const auto epsilon = [](c10::ScalarType type) {
    switch (type) {
      case c10::kDouble:
        return std::numeric_limits<double>::epsilon();
      case c10::kBFloat16:
        return static_cast<double>(std::numeric_limits<c10::BFloat16>::epsilon());
      case c10::kHalf:
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

std::string_view method_name(Method method) {
  switch (method) {
    case Method::kNewtonSchulz:
      return "newton_schulz";
    case Method::kGram:
      return "gram";
    case Method::kAccurateGram:
      return "accurate_gram";
    case Method::kExact:
      return "exact";
    default:
      return "auto";
  }
}

c10::ScalarType parse_precision(std::string_view name) {
  if (name == "auto") return kAutoPrecision;
  if (name == "bfloat16") return c10::kBFloat16;
  if (name == "float32") return c10::kFloat;
  if (name == "float64") return c10::kDouble;
  TORCH_CHECK_VALUE(
      false, "group_muon: unknown precision '", name, "': use auto, bfloat16, float32 or float64");
}

std::string_view precision_name(c10::ScalarType precision) {
  if (precision == kAutoPrecision) return "auto";
  return precision == c10::kBFloat16 ? "bfloat16"
         : precision == c10::kFloat  ? "float32"
                                     : "float64";
}

void check(const OrthogonalizeOptions& options) {
  TORCH_CHECK_VALUE(
      options.precision == kAutoPrecision || options.precision == c10::kBFloat16 ||
          options.precision == c10::kFloat || options.precision == c10::kDouble,
      "group_muon: precision should be auto, bfloat16, float32 or float64, not ",
      options.precision);
  TORCH_CHECK_VALUE(options.eps >= 0, "group_muon: eps should be 0 or more, not ", options.eps);
  TORCH_CHECK_VALUE(
      options.rank_tolerance >= 0 && options.rank_tolerance < 1,
      "group_muon: rank_tolerance should be in [0, 1), not ", options.rank_tolerance);
  TORCH_CHECK_VALUE(
      options.method == Method::kExact || !options.coefficients.empty(),
      "group_muon: an iteration needs at least one step");
  TORCH_CHECK_VALUE(
      options.restarts.empty() || may_be_gram(options.method),
      "group_muon: restarts apply only to the methods gram, accurate_gram and auto");
  TORCH_CHECK_VALUE(
      options.gram_coefficients.empty() ||
          options.gram_coefficients.size() == options.coefficients.size(),
      "group_muon: gram_coefficients should have as many steps as coefficients, ",
      options.coefficients.size(), ", not ", options.gram_coefficients.size());
  int64_t previous = 0;
  for (const auto restart : options.restarts) {
    TORCH_CHECK_VALUE(
        restart > previous && restart < static_cast<int64_t>(options.coefficients.size()),
        "group_muon: restarts should increase and lie between 1 and ",
        options.coefficients.size() - 1, " for ", options.coefficients.size(),
        " steps, but one is ", restart);
    previous = restart;
  }
}

OrthogonalizeOptions resolved(OrthogonalizeOptions options, const c10::Device& device) {
  check_engine(options.engine, device);
  const bool can_be_gram = may_be_gram(options.method);
  if (options.precision == kAutoPrecision) {
    options.precision = default_precision(can_be_gram ? options.engine : Engine::kAuto, device);
  }
  const bool left_to_us = options.engine == Engine::kAuto;
  options.engine = can_be_gram && !(left_to_us && options.precision == c10::kDouble)
                       ? resolved_engine(options.engine, device, options.precision)
                       : Engine::kPortable;
  if (options.method == Method::kAuto) {
    options.method = options.engine == Engine::kPortable ? Method::kNewtonSchulz : Method::kGram;
  }
  if (is_gram(options.method)) {
    if (!options.gram_coefficients.empty()) {
      options.coefficients = options.gram_coefficients;
    } else if (options.precision == c10::kBFloat16) {
      options.coefficients = with_gram_margin(options.coefficients);
    }
  }
  return options;
}

}  // namespace group_muon
