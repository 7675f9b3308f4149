#include "group_muon/plan.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <map>
#include <tuple>

#include "group_muon/text.h"

namespace group_muon {
namespace {

using at::Tensor;

// The segment's rows in gathering order; of owned heads those in the tensors that hold them.
std::vector<int64_t> rows_in_order(
    const Segment& segment, const std::vector<int64_t>& order,
    const std::optional<OwnedHeads>& owned) {
  auto starts = segment.head_starts;
  if (owned) {
    std::fill(starts.begin(), starts.end(), -1);
    int64_t next = 0;
    for (const auto head : owned->heads) starts[head] = segment.head_rows * next++;
  }
  std::vector<int64_t> rows;
  rows.reserve(segment.num_rows());
  for (const auto head : order) {
    if (starts[head] < 0) continue;
    for (int64_t row = 0; row < segment.head_rows; ++row) rows.push_back(starts[head] + row);
  }
  return rows;
}

MatrixShape whole_shape(const Weight& weight) {
  return weight.owned ? weight.owned->whole : shape_of(weight);
}

// The segments to step. A layout without segments is a single head: the whole matrix.
std::vector<Segment> segments_of(const Weight& weight) {
  const auto& [axis, transposed, higher_dims, segments] = weight.layout;
  if (weight.owned) return {segments.at(weight.owned->segment)};
  if (!segments.empty()) return segments;
  const auto shape = shape_of(weight);
  return {
      {.name = "matrix",
       .head_starts = {0},
       .head_rows = axis == Axis::kRows ? shape.rows : shape.cols,
       .schedule = {Grouping{.group_size = 1}}}};
}

OutIn out_in(const Layout& layout, int64_t rows, int64_t cols) {
  return layout.transposed ? OutIn{cols, rows} : OutIn{rows, cols};
}

// The slot of one segment. Its blocks are rows × cols before any transpose.
struct ShapedSlot {
  Slot slot;
  int64_t rows;
  int64_t cols;
};

ShapedSlot plan_segment(const Weight& weight, const Segment& segment, const StepOptions& options) {
  TORCH_CHECK_VALUE(
      !options.match_spectral || !weight.owned ||
          static_cast<int64_t>(weight.owned->heads.size()) == segment.num_heads(),
      "group_muon: parameter '", weight.name, "': match_spectral needs all heads of segment '",
      segment.name, "' on one process; set it before processes share the steps");
  const auto shape = whole_shape(weight);
  const auto& grouping = grouping_at(segment.schedule, weight.step, weight.lr_fraction);
  const RandomKey key{options.seed, weight.step, parameter_key(weight.partition), segment.stream};
  const bool by_rows = weight.layout.axis == Axis::kRows;
  const auto side = [&](int64_t extent) {
    return by_rows ? std::pair{extent, shape.cols} : std::pair{shape.rows, extent};
  };
  const auto [rows, cols] = side(grouping.group_size * segment.head_rows);
  const auto [segment_rows, segment_cols] = side(segment.num_rows());
  Slot slot;
  slot.axis = by_rows ? 0 : 1;
  slot.rows = rows_in_order(segment, head_order(segment.num_heads(), grouping, key), weight.owned);
  slot.groups = static_cast<int64_t>(slot.rows.size()) / (grouping.group_size * segment.head_rows);
  slot.transpose = rows > cols;
  slot.scale = grouping.lr_factor * update_scale(
                                        options.scale, out_in(weight.layout, rows, cols),
                                        out_in(weight.layout, segment_rows, segment_cols),
                                        out_in(weight.layout, shape.rows, shape.cols));
  return {std::move(slot), rows, cols};
}

// Whether a SIMD engine can read and write the weight in place: contiguous fp32, heads along rows, and blocks that need
// nothing else.
bool can_be_in_place(
    const Weight& weight, const StepOptions& options, const OrthogonalizeOptions& here) {
  const auto fits = [](const Tensor& tensor) {
    return tensor.is_cpu() && tensor.scalar_type() == at::kFloat && tensor.is_contiguous() &&
           !tensor.is_neg();
  };
  return here.engine != Engine::kPortable && !options.match_spectral && !options.row_balance &&
         weight.layout.axis == Axis::kRows && fits(weight.value) && fits(weight.grad) &&
         fits(weight.momentum);
}

}  // namespace

OwnedHeads parse_owned_heads(std::string_view text) {
  const auto [sizes, rest] = cut(text, '/');
  const auto [segment, heads] = cut(rest, '/');
  const auto numbers = parse_numbers(sizes, 'x', text);
  TORCH_CHECK_VALUE(
      numbers.size() == 3, "group_muon: '", text, "' should begin with matrices x rows x columns");
  return {
      {numbers[0], numbers[1], numbers[2]},
      static_cast<size_t>(parse_number(segment, text)),
      parse_numbers(heads, '-', text)};
}

std::string to_string(const OwnedHeads& owned) {
  const auto& [count, rows, cols] = owned.whole;
  return c10::str(count, 'x', rows, 'x', cols, '/', owned.segment, '/', join(owned.heads, "-"));
}

MatrixShape shape_of(const Weight& weight) {
  return matrix_shape(weight.value.sizes(), weight.layout, weight.name);
}

void check_value(const Tensor& value, const std::string& name, bool average) {
  TORCH_CHECK_TYPE(
      value.layout() == at::kStrided, "group_muon: parameter '", name, "' is ", value.layout(),
      ", but Group Muon supports only dense (strided) weights");
  TORCH_CHECK_TYPE(
      value.is_floating_point(), "group_muon: parameter '", name, "' is ", value.scalar_type(),
      ", but Group Muon supports only real floating-point weights");
  TORCH_CHECK_TYPE(
      value.scalar_type() != at::kHalf || average, "group_muon: parameter '", name,
      "' is Half, in which summed momentum overflows; set average to true, or keep weights in ",
      "bfloat16 or float32");
}

void check_grad(const Tensor& value, const Tensor& grad, const std::string& name) {
  TORCH_CHECK_TYPE(
      grad.layout() == at::kStrided, "group_muon: parameter '", name,
      "' has a sparse gradient, but Group Muon supports only dense gradients");
  TORCH_CHECK_VALUE(
      grad.sizes() == value.sizes(), "group_muon: parameter '", name, "' has shape ", value.sizes(),
      ", but its gradient has shape ", grad.sizes());
}

void check_momentum(const Tensor& value, const Tensor& momentum, const std::string& name) {
  TORCH_CHECK_VALUE(
      momentum.sizes() == value.sizes(), "group_muon: parameter '", name, "' has shape ",
      value.sizes(), ", but its momentum has shape ", momentum.sizes());
}

std::vector<Slot> slots_of(const Weight& weight, const StepOptions& options) {
  std::vector<Slot> slots;
  for (const auto& segment : segments_of(weight)) {
    slots.push_back(plan_segment(weight, segment, options).slot);
    slots.back().matrices = shape_of(weight).count;
  }
  return slots;
}

bool is_stepped_in_place(const Weight& weight, const StepOptions& options) {
  return can_be_in_place(
      weight, options, resolved(options.orthogonalize, weight.momentum.device()));
}

Plan make_plan(
    const std::vector<Weight>& weights, const StepOptions& options, int64_t max_elements) {
  Plan plan;
  auto& buckets = plan.buckets;
  std::map<std::tuple<int64_t, int64_t, std::string, at::ScalarType, bool>, size_t> open;
  for (size_t i = 0; i < weights.size(); ++i) {
    const auto& weight = weights[i];
    if (weight.value.numel() == 0) continue;
    const int64_t matrices = shape_of(weight).count;
    const auto& momentum = weight.momentum;
    const auto orthogonalize = resolved(options.orthogonalize, momentum.device());
    const bool in_place = can_be_in_place(weight, options, orthogonalize);
    if (!in_place) plan.gathered.push_back(i);
    for (const auto& segment : segments_of(weight)) {
      const auto [slot, rows, cols] = plan_segment(weight, segment, options);
      const auto [short_side, long_side] = std::minmax(rows, cols);
      const auto key = std::tuple{
          short_side, long_side, momentum.device().str(), momentum.scalar_type(), in_place};
      const int64_t max_blocks =
          in_place ? std::numeric_limits<int64_t>::max() : max_elements / (short_side * long_side);
      // Stacked matrices may be split over several buckets.
      for (int64_t matrix = 0; matrix < matrices;) {
        const auto found = open.find(key);
        int64_t room =
            found == open.end() ? 0 : (max_blocks - buckets[found->second].blocks) / slot.groups;
        if (room < 1) {
          open[key] = buckets.size();
          buckets.push_back(
              {short_side, long_side, 0, momentum.options(), orthogonalize, in_place, {}});
          room = std::max<int64_t>(1, max_blocks / slot.groups);
        }
        auto& bucket = buckets[open[key]];
        Slot part = slot;
        part.weight = i;
        part.first_matrix = matrix;
        part.matrices = std::min(room, matrices - matrix);
        part.first_block = bucket.blocks;
        matrix += part.matrices;
        bucket.blocks += part.blocks();
        bucket.slots.push_back(std::move(part));
      }
    }
  }
  return plan;
}

}  // namespace group_muon
