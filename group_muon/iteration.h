#pragma once
// Options of orthogonalization: method, coefficients, precision and engine.

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "group_muon/engine.h"

namespace group_muon {

/// One step of the iteration maps every singular value x to a·x + b·x³ + c·x⁵.
struct Coefficients {
  double a = 0;
  double b = 0;
  double c = 0;

  bool operator==(const Coefficients&) const = default;
};

enum class Method {
  kNewtonSchulz,  // X ← aX + (bA + cA²)X, A = XXᵀ
  kGram,          // the same polynomial, iterated on the small Gram matrix XXᵀ instead of on X
  kAccurateGram,  // kGram with the small matrices in fp32 or better
  kExact,         // polar factor by SVD
  kAuto,          // kGram with a SIMD engine, else kNewtonSchulz
};

constexpr bool is_gram(Method method) {
  return method == Method::kGram || method == Method::kAccurateGram;
}
constexpr bool may_be_gram(Method method) { return is_gram(method) || method == Method::kAuto; }

/// The first `steps` entries of a named list: quintic (Muon's), polar_express or you_jiacheng. A shorter list repeats
/// its last entry. Then `tail_steps` times (2, -1.5, 0.5), which converges to σ = 1. Polar Express is tuned for
/// σ ≤ 1, so it gets a margin against rounding: 1% as published, 5% for a Gram method, which rounds more.
std::vector<Coefficients> coefficient_list(
    std::string_view name, int64_t steps, int64_t tail_steps, Method method);

/// The list followed by `tail_steps` converging steps.
std::vector<Coefficients> with_tail(std::vector<Coefficients> coefficients, int64_t tail_steps);

/// A custom list as a Gram method needs it in bf16. Every step p becomes p(x / margin), with the smallest margin up to
/// 5% for which values that are 5% too large stay bounded. Steps that converge to 1 keep their form. A list that is
/// bounded already, such as quintic, is returned as it is.
std::vector<Coefficients> with_gram_margin(const std::vector<Coefficients>& coefficients);

/// The steps after which a Gram method with these coefficients restarts from XXᵀ: as few as keep the condition
/// number of the accumulated factors below `limit`, or as low as possible.
std::vector<int64_t> gram_restarts(const std::vector<Coefficients>& coefficients, double limit);

/// Largest condition numbers that bf16 tolerates, for blocks whose norm is spread over many directions (loose) and
/// for any block (tight), and that fp32 tolerates.
constexpr double kLooseCondition = 57;
constexpr double kTightCondition = 20;
constexpr double kFloatCondition = 1000;

/// Precision not chosen yet; see default_precision().
constexpr auto kAutoPrecision = c10::ScalarType::Undefined;

struct OrthogonalizeOptions {
  Method method = Method::kNewtonSchulz;
  Engine engine = Engine::kAuto;  // for the Gram methods; the others use libtorch
  std::vector<Coefficients> coefficients = coefficient_list("quintic", 5, 0, Method::kNewtonSchulz);
  // Gram methods: instead of `coefficients`; empty: the same, in bf16 with_gram_margin().
  std::vector<Coefficients> gram_coefficients = {};
  std::vector<int64_t> restarts = {};  // Gram methods: steps to restart after; empty: automatic
  c10::ScalarType precision = kAutoPrecision;
  double eps = 1e-7;          // divisor ‖X‖·(1 + eps), or ‖X‖ + eps if not relative
  bool relative_eps = true;   // keeps scale invariance for tiny blocks
  double rank_tolerance = 0;  // kExact: σ ≤ tolerance·σ_max counts as 0; 0: by precision

  bool operator==(const OrthogonalizeOptions&) const = default;
};

/// The precision of an SVD: fp32 or fp64. There is no SVD in bf16.
c10::ScalarType svd_precision(c10::ScalarType precision);

/// The default rank tolerance, relative to the largest singular value: the SVD's own rounding error or
/// one rounding unit of the data, whichever is larger.
double default_rank_tolerance(c10::ScalarType data, c10::ScalarType precision, int64_t long_side);

/// The options with that default in place of a rank_tolerance of 0.
OrthogonalizeOptions with_rank_tolerance(
    OrthogonalizeOptions options, c10::ScalarType data, int64_t long_side);

/// Names: auto, newton_schulz, gram, accurate_gram, exact; auto, bfloat16, float32, float64.
Method parse_method(std::string_view name);
std::string_view method_name(Method method);
c10::ScalarType parse_precision(std::string_view name);
std::string_view precision_name(c10::ScalarType precision);

/// Rejects invalid options. Errors name the value and what would be valid.
void check(const OrthogonalizeOptions& options);

/// The options with every `auto` (precision, engine, method) replaced by the choice for this device, and with the
/// coefficients of the chosen method.
OrthogonalizeOptions resolved(OrthogonalizeOptions options, const c10::Device& device);

}  // namespace group_muon
