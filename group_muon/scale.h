#pragma once
// Update scale: the factor on the learning rate for a block of a given shape.

#include <cstdint>
#include <string>
#include <string_view>

namespace group_muon {

/// α(out × in), the factor on lr. A full-rank polar factor has entries of size 1/√max(out, in), so with
/// kSqrtMax lr is the size of one entry's step.
enum class ScaleRule {
  kNaive,         // 1
  kKellerJordan,  // √max(1, out/in)
  kMup,           // √(out/in)
  kMoonlight,     // 0.2·√max(out, in)
  kSqrtMax,       // √max(out, in)
};

/// The shape that lr refers to: the segment (768×768 for Q) or the whole weight (2304×768).
enum class ScaleReference { kSegment, kMatrix };

struct ScaleOptions {
  ScaleRule base = ScaleRule::kSqrtMax;
  ScaleRule transfer = ScaleRule::kSqrtMax;  // kNaive: no transfer
  ScaleReference reference = ScaleReference::kSegment;

  bool operator==(const ScaleOptions&) const = default;
};

struct OutIn {
  int64_t out = 1;
  int64_t in = 1;
};

double scale_factor(ScaleRule rule, OutIn shape);

/// base(reference) · transfer(block) / transfer(reference). With one rule for both this is α(block).
double update_scale(const ScaleOptions& options, OutIn block, OutIn segment, OutIn matrix);

/// Names: naive, keller_jordan, mup, moonlight, sqrt_max; segment, matrix.
ScaleRule parse_scale_rule(std::string_view name);
ScaleReference parse_scale_reference(std::string_view name);

}  // namespace group_muon
