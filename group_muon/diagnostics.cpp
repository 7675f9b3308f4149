#include "group_muon/diagnostics.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "group_muon/balance.h"
#include "group_muon/blocks.h"
#include "group_muon/orthogonalize.h"

namespace group_muon {
namespace {

using at::Tensor;

std::array<double, kRanks> tolerances_for(const Tensor& blocks, c10::ScalarType data) {
  std::array<double, kRanks> tolerances = {};
  std::copy(kRankTolerances.begin(), kRankTolerances.end(), tolerances.begin());
  tolerances.back() = default_rank_tolerance(data, data, std::max(blocks.size(1), blocks.size(2)));
  return tolerances;
}

double sum_of(const Tensor& tensor) { return tensor.sum().item<double>(); }

// sigma: [count, short side], in decreasing order.
Spectra spectra_of(const Tensor& sigma, const std::array<double, kRanks>& tolerances) {
  const Tensor largest = sigma.amax(-1, true);
  const Tensor sums = sigma.sum(-1, true);
  const Tensor zero = largest == 0;
  const Tensor one = at::ones({}, sigma.options());
  Spectra result;
  result.nuclear_norm = sum_of(sums);
  for (size_t i = 0; i < kRanks; ++i) {
    result.ranks[i] = sum_of((sigma > largest * tolerances[i]).to(at::kDouble));
  }
  const Tensor relative = sigma / at::where(zero, one, largest);
  result.stable_rank = sum_of(relative.square());
  const Tensor share = sigma / at::where(zero, one, sums);
  const Tensor entropy = -at::xlogy(share, share).sum(-1, true);
  result.effective_rank = sum_of(entropy.exp().masked_fill(zero, 0));
  result.count = sigma.size(0);
  const Tensor mean = relative.mean(0);
  const auto last = static_cast<int64_t>(result.quantiles.size()) - 1;
  for (int64_t i = 0; i <= last; ++i) {
    result.quantiles[i] = mean[i * (mean.size(0) - 1) / last].item<double>();
  }
  return result;
}

// Square roots of the eigenvalues of the small matrix XXᵀ, which are the squared singular values.
Tensor estimated_singular_values(const Tensor& blocks) {
  const bool tall = blocks.size(1) > blocks.size(2);
  const Tensor x = (tall ? blocks.mT() : blocks).to(at::kDouble);
  return at::linalg_eigvalsh(at::bmm(x, x.mT())).clamp_min(0).sqrt().flip(-1);
}

// Relative to the largest. Squares of smaller singular values are lost in the rounding of XXᵀ.
constexpr double kSmallestEstimate = 3e-7;

// The line numbers of a segment, in increasing order.
std::vector<int64_t> lines_of(const Segment& segment) {
  std::vector<int64_t> lines;
  for (const auto start : segment.head_starts) {
    for (int64_t i = 0; i < segment.head_rows; ++i) lines.push_back(start + i);
  }
  std::sort(lines.begin(), lines.end());
  return lines;
}

Tensor index_of(const std::vector<int64_t>& lines, const Tensor& like) {
  return at::tensor(lines, at::kLong).to(like.device());
}

std::vector<double> head_norms(const Tensor& squares, const Segment& segment) {
  std::vector<double> norms;
  for (const auto start : segment.head_starts) {
    norms.push_back(std::sqrt(sum_of(squares.narrow(0, start, segment.head_rows))));
  }
  return norms;
}

Weight with_checked_layout(Weight weight) {
  weight.layout = checked(weight.layout, weight.value.sizes(), weight.name);
  return weight;
}

// O and s of a weight.
struct Update {
  Tensor o;      // in the weight's shape, fp32 or fp64
  Tensor scale;  // [lines], fp64
};

// x has the weight's shape. Calls use(slot, its blocks) for each segment.
template <typename Use>
Update update_of(const Tensor& x, const Weight& weight, const StepOptions& options, Use&& use) {
  Update update{
      at::zeros_like(x, at::MemoryFormat::Contiguous),
      at::zeros({as_lines(x, weight).size(1)}, x.options().dtype(at::kDouble))};
  for (const auto& slot : slots_of(weight, options)) {
    const Tensor taken = take_blocks(x, weight, slot), blocks = taken.flatten(0, 1);
    use(slot, blocks);
    const Tensor input = options.row_balance
                             ? with_balanced_rows(taken, weight.layout.transposed).flatten(0, 1)
                             : blocks;
    const auto orthogonalization = with_rank_tolerance(  // as in the step
        resolved(options.orthogonalize, x.device()), weight.value.scalar_type(),
        std::max(blocks.size(1), blocks.size(2)));
    const Tensor white = orthogonalize(input, orthogonalization).unflatten(0, {-1, slot.groups});
    if (options.match_spectral) match_spectral_norm(white, slot.axis);
    add_blocks(update.o, weight, slot, white.to(x.scalar_type()), 1);
    update.scale.index_fill_(0, index_of(slot.rows, x), slot.scale);
  }
  return update;
}

Tensor fp32_at_least(const Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? tensor : tensor.to(at::kFloat);
}

}  // namespace

Spectra no_spectra() {
  Spectra none;
  none.nuclear_norm = none.stable_rank = none.effective_rank = std::nan("");
  none.ranks.fill(std::nan(""));
  none.quantiles.fill(std::nan(""));
  return none;
}

Spectra operator+(const Spectra& a, const Spectra& b) {
  Spectra sum = a;
  sum.nuclear_norm += b.nuclear_norm;
  for (size_t i = 0; i < kRanks; ++i) sum.ranks[i] += b.ranks[i];
  sum.stable_rank += b.stable_rank;
  sum.effective_rank += b.effective_rank;
  sum.count += b.count;
  const double share =
      sum.count == 0 ? 0 : static_cast<double>(b.count) / static_cast<double>(sum.count);
  for (size_t i = 0; i < sum.quantiles.size(); ++i) {
    sum.quantiles[i] += share * (b.quantiles[i] - a.quantiles[i]);
  }
  return sum;
}

Whitening operator+(const Whitening& a, const Whitening& b) {
  Whitening sum = a;
  sum.rows += b.rows;
  sum.blocks += b.blocks;
  sum.of_blocks.reset();
  if (a.of_blocks && b.of_blocks) sum.of_blocks = *a.of_blocks + *b.of_blocks;
  sum.first_order += b.first_order;
  sum.squared_norm += b.squared_norm;
  sum.step_squared_norm += b.step_squared_norm;
  sum.head_norms.insert(sum.head_norms.end(), b.head_norms.begin(), b.head_norms.end());
  sum.whitened_head_norms.insert(
      sum.whitened_head_norms.end(), b.whitened_head_norms.begin(), b.whitened_head_norms.end());
  return sum;
}

Tensor singular_values(const Tensor& blocks) { return at::linalg_svdvals(blocks.to(at::kDouble)); }

Spectra spectra(const Tensor& blocks, Accuracy accuracy, std::optional<c10::ScalarType> data) {
  TORCH_CHECK_VALUE(
      blocks.dim() == 3, "group_muon: spectra needs [count, rows, cols], not a tensor of shape ",
      blocks.sizes());
  if (blocks.numel() == 0) return {};
  auto tolerances = tolerances_for(blocks, data.value_or(blocks.scalar_type()));
  if (!std::isfinite(blocks.abs().max().item<double>())) return no_spectra();  // LAPACK rejects NaN
  if (accuracy == Accuracy::kExact) return spectra_of(singular_values(blocks), tolerances);
  tolerances.back() = std::max(tolerances.back(), kSmallestEstimate);
  return spectra_of(estimated_singular_values(blocks), tolerances);
}

std::vector<Whitening> measure(
    const Tensor& direction, const Weight& given, const Layout& heads, const StepOptions& options,
    Accuracy accuracy) {
  const at::NoGradGuard no_grad;
  const Weight weight = with_checked_layout(given);
  check_grad(weight.value, weight.grad, weight.name);
  check_momentum(weight.value, direction, weight.name);
  const Layout reported = checked(heads, weight.value.sizes(), weight.name);
  TORCH_CHECK_VALUE(
      reported.segments.empty() || reported.axis == weight.layout.axis ||
          weight.layout.segments.empty(),
      "group_muon: parameter '", weight.name,
      "' has heads along rows in one layout and along columns in the other");
  const auto shape = matrix_shape(weight.value.sizes(), weight.layout, weight.name);
  TORCH_CHECK_VALUE(
      shape.count == matrix_shape(weight.value.sizes(), reported, weight.name).count,
      "group_muon: parameter '", weight.name,
      "' is a stack of matrices in one layout but not in the other");
  // A single block has no axis of its own; use that of the heads.
  Weight lying = weight;
  if (lying.layout.segments.empty()) lying.layout.axis = reported.axis;

  const Tensor shaped = fp32_at_least(direction), x = as_lines(shaped, lying);
  std::vector<std::pair<Slot, Spectra>> parts;
  const auto [o, scale] =
      update_of(shaped, lying, options, [&](const Slot& slot, const Tensor& blocks) {
        parts.emplace_back(slot, spectra(blocks, accuracy, direction.scalar_type()));
      });
  // Sums over each line.
  const auto over_line = [](const Tensor& tensor) { return tensor.sum(at::IntArrayRef({0, 2})); };
  const Tensor fine = as_lines(o, lying).to(at::kDouble);
  const Tensor first_order = over_line(as_lines(weight.grad, lying).to(at::kDouble) * fine) * scale;
  const Tensor squares = over_line(fine.square()), step_squares = squares * scale.square();
  const Tensor before = over_line(x.to(at::kDouble).square());

  const bool by_rows = lying.layout.axis == Axis::kRows;
  std::vector<Whitening> results;
  auto& whole = results.emplace_back();
  whole.rows = shape.count * shape.rows;
  whole.cols = shape.cols;
  whole.of_blocks = Spectra{};
  for (const auto& [slot, part] : parts) {
    whole.blocks += slot.blocks();
    whole.of_blocks = *whole.of_blocks + part;
  }
  whole.first_order = sum_of(first_order);
  whole.squared_norm = sum_of(squares);
  whole.step_squared_norm = sum_of(step_squares);

  for (const auto& segment : reported.segments) {
    const auto lines = lines_of(segment);
    const Tensor index = index_of(lines, x);
    auto& result = results.emplace_back();
    result.segment = segment.name;
    result.rows = shape.count * (by_rows ? segment.num_rows() : shape.rows);
    result.cols = by_rows ? shape.cols : segment.num_rows();
    for (const auto& [slot, part] : parts) {
      auto covered = slot.rows;
      std::sort(covered.begin(), covered.end());
      if (covered != lines) continue;
      result.blocks = slot.blocks();
      result.of_blocks = part;
    }
    result.first_order = sum_of(first_order.index_select(0, index));
    result.squared_norm = sum_of(squares.index_select(0, index));
    result.step_squared_norm = sum_of(step_squares.index_select(0, index));
    result.head_norms = head_norms(before, segment);
    result.whitened_head_norms = head_norms(squares, segment);
  }
  return results;
}

Tensor scaled_update(const Tensor& direction, const Weight& given, const StepOptions& options) {
  const at::NoGradGuard no_grad;
  const Weight weight = with_checked_layout(given);
  check_momentum(weight.value, direction, weight.name);
  const auto [o, scale] =
      update_of(fp32_at_least(direction), weight, options, [](const Slot&, const Tensor&) {});
  const Tensor scaled = as_lines(o, weight) * scale.to(o.scalar_type()).unsqueeze(-1);
  return (weight.layout.axis == Axis::kRows ? scaled : scaled.mT()).reshape(weight.value.sizes());
}

double guaranteed_decrease(const Whitening& update, double lr, double beta) {
  return lr * update.first_order - beta / 2 * lr * lr * update.step_squared_norm;
}

Comparison compare(const Whitening& grouped, const Whitening& full, double lr) {
  TORCH_CHECK_VALUE(lr >= 0, "group_muon: lr should be 0 or more, not ", lr);
  TORCH_CHECK_VALUE(
      grouped.rows == full.rows && grouped.cols == full.cols,
      "group_muon: compared updates should have the same shape, not ", grouped.rows, "x",
      grouped.cols, " and ", full.rows, "x", full.cols);
  Comparison result;
  if (grouped.of_blocks && full.of_blocks) {
    result.gain = grouped.of_blocks->nuclear_norm - full.of_blocks->nuclear_norm;
    result.ideal_cost.emplace();
    for (size_t i = 0; i < kRanks; ++i) {
      (*result.ideal_cost)[i] = grouped.of_blocks->ranks[i] - full.of_blocks->ranks[i];
    }
  }
  result.norm_cost = grouped.squared_norm - full.squared_norm;
  result.first_order_gain = grouped.first_order - full.first_order;
  // Compares lr·gain with β/2·lr²·cost.
  const double cost = grouped.step_squared_norm - full.step_squared_norm;
  const double gain = result.first_order_gain;
  using Pays = BreakEven::Pays;
  if (lr == 0 || std::isnan(gain) || std::isnan(cost)) {
    result.break_even.pays = Pays::kUnknown;
  } else if (cost == 0 || (gain > 0) != (cost > 0)) {
    result.break_even.pays = gain > 0 ? Pays::kAlways : Pays::kNever;
  } else {
    result.break_even = {cost > 0 ? Pays::kBelow : Pays::kAbove, 2 * gain / (lr * cost)};
  }
  return result;
}

std::string to_string(BreakEven::Pays pays) {
  switch (pays) {
    case BreakEven::Pays::kAlways:
      return "always";
    case BreakEven::Pays::kNever:
      return "never";
    case BreakEven::Pays::kBelow:
      return "below";
    case BreakEven::Pays::kAbove:
      return "above";
    default:
      return "unknown";
  }
}

std::string to_string(const BreakEven& break_even) {
  using Pays = BreakEven::Pays;
  if (break_even.pays != Pays::kBelow && break_even.pays != Pays::kAbove) {
    return to_string(break_even.pays);
  }
  return c10::str("as long as β ", break_even.pays == Pays::kBelow ? "< " : "> ", break_even.beta);
}

double imbalance(const std::vector<double>& norms) {
  if (norms.empty()) return 0;
  const auto count = static_cast<double>(norms.size());
  const double mean = std::accumulate(norms.begin(), norms.end(), 0.0) / count;
  if (mean == 0) return 0;
  double squares = 0;
  for (const double norm : norms) squares += (norm - mean) * (norm - mean);
  return std::sqrt(squares / count) / mean;
}

}  // namespace group_muon
