#include "group_muon/scale.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>

namespace group_muon {

double scale_factor(ScaleRule rule, OutIn shape) {
  const auto out = static_cast<double>(shape.out);
  const auto in = static_cast<double>(shape.in);
  switch (rule) {
    case ScaleRule::kNaive:
      return 1.0;
    case ScaleRule::kKellerJordan:
      return std::sqrt(std::max(1.0, out / in));
    case ScaleRule::kMup:
      return std::sqrt(out / in);
    case ScaleRule::kMoonlight:
      return 0.2 * std::sqrt(std::max(out, in));
    case ScaleRule::kSqrtMax:
      return std::sqrt(std::max(out, in));
  }
  TORCH_INTERNAL_ASSERT(false);
}

double update_scale(const ScaleOptions& options, OutIn block, OutIn segment, OutIn matrix) {
  const OutIn reference = options.reference == ScaleReference::kSegment ? segment : matrix;
  return scale_factor(options.base, reference) * scale_factor(options.transfer, block) /
         scale_factor(options.transfer, reference);
}

ScaleRule parse_scale_rule(std::string_view name) {
  if (name == "naive") return ScaleRule::kNaive;
  if (name == "keller_jordan") return ScaleRule::kKellerJordan;
  if (name == "mup") return ScaleRule::kMup;
  if (name == "moonlight") return ScaleRule::kMoonlight;
  if (name == "sqrt_max") return ScaleRule::kSqrtMax;
  TORCH_CHECK_VALUE(
      false, "group_muon: unknown scale '", name,
      "': use naive, keller_jordan, mup, moonlight or sqrt_max (transfer also accepts same)");
}

ScaleReference parse_scale_reference(std::string_view name) {
  if (name == "segment") return ScaleReference::kSegment;
  if (name == "matrix") return ScaleReference::kMatrix;
  TORCH_CHECK_VALUE(false, "group_muon: unknown reference '", name, "': use segment or matrix");
}

}  // namespace group_muon
