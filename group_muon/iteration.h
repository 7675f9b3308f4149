#pragma once
// What orthogonalization is to do: the method, its coefficients, precision and engine, as options. Engines do it.

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "group_muon/engine.h"

namespace group_muon {

/// One step of an iteration maps every singular value x to a·x + b·x³ + c·x⁵.
struct Coefficients {
  double a = 0;
  double b = 0;
  double c = 0;

  bool operator==(const Coefficients&) const = default;
};

enum class Method {
  kNewtonSchulz,  // X ← aX + (bA + cA²)X, A = XXᵀ
  kGram,          // the same polynomial, iterated on the small Gram matrix XXᵀ instead of on X
  kAccurateGram,  // the same, with the small matrices in fp32 at least
  kExact,         // polar factor by SVD
  kAuto,          // kGram with an engine of our own, else kNewtonSchulz
};

constexpr bool is_gram(Method method) {
  return method == Method::kGram || method == Method::kAccurateGram;
}
constexpr bool may_be_gram(Method method) { return is_gram(method) || method == Method::kAuto; }

/// Named lists: quintic (Muon's), polar_express, you_jiacheng. `steps` entries, the last repeated where the
/// list is shorter, then `tail_steps` of (2, -1.5, 0.5), which converge to σ = 1. Polar Express is
/// tuned for σ ≤ 1, so it gets a margin against rounding, a larger one for what may be a Gram method.
std::vector<Coefficients> coefficient_list(
    std::string_view name, int64_t steps, int64_t tail_steps, Method method);

/// The list, then `tail_steps` of the converging step.
std::vector<Coefficients> with_tail(std::vector<Coefficients> coefficients, int64_t tail_steps);

/// The steps after which a Gram method starts anew from XXᵀ, for these coefficients: as few as keep the
/// condition of the factors it accumulates below `limit`, or as low as it can be.
std::vector<int64_t> gram_restarts(const std::vector<Coefficients>& coefficients, double limit);

/// Conditions that bf16 bears, of blocks whose norm is spread over directions and of any block; and fp32.
constexpr double kLooseCondition = 57;
constexpr double kTightCondition = 20;
constexpr double kFloatCondition = 1000;

/// Precision that is not chosen yet: see default_precision().
constexpr auto kAutoPrecision = c10::ScalarType::Undefined;

struct OrthogonalizeOptions {
  Method method = Method::kNewtonSchulz;
  Engine engine = Engine::kAuto;  // of the Gram methods; the others are libtorch's
  std::vector<Coefficients> coefficients = coefficient_list("quintic", 5, 0, Method::kNewtonSchulz);
  std::vector<int64_t> restarts =
      {};  // Gram methods: start anew after so many steps; empty: chosen
  c10::ScalarType precision = kAutoPrecision;
  double eps = 1e-7;          // divisor ‖X‖·(1 + eps), or ‖X‖ + eps if not relative
  bool relative_eps = true;   // relative keeps scale invariance for tiny blocks
  double rank_tolerance = 0;  // kExact: σ ≤ tolerance·σ_max count as 0; 0: by precision

  bool operator==(const OrthogonalizeOptions&) const = default;
};

/// The precision of an SVD: fp32 or fp64. It has no bf16.
c10::ScalarType svd_precision(c10::ScalarType precision);

/// What counts as zero where nothing is said, relative to the largest singular value: the SVD's own
/// rounding, or one unit of the data's, whichever is larger.
double default_rank_tolerance(c10::ScalarType data, c10::ScalarType precision, int64_t long_side);

/// The options with that in the place of a rank_tolerance of 0.
OrthogonalizeOptions with_rank_tolerance(
    OrthogonalizeOptions options, c10::ScalarType data, int64_t long_side);

/// Names: auto, newton_schulz, gram, accurate_gram, exact; auto, bfloat16, float32, float64.
Method parse_method(std::string_view name);
std::string_view method_name(Method method);
c10::ScalarType parse_precision(std::string_view name);
std::string_view precision_name(c10::ScalarType precision);

/// Refuses options that make no sense, naming the value and what would be valid.
void check(const OrthogonalizeOptions& options);

/// The options with nothing left to choose: precision, engine and method as they are on this device.
OrthogonalizeOptions resolved(OrthogonalizeOptions options, const c10::Device& device);

}  // namespace group_muon
