#include "group_muon/plan.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <map>
#include <tuple>

namespace group_muon {
namespace {

using at::Tensor;

// The segment's rows in gathering order.
std::vector<int64_t> rows_in_order(const Segment& segment, const std::vector<int64_t>& order) {
  std::vector<int64_t> rows;
  rows.reserve(segment.num_rows());
  for (const auto head : order) {
    for (int64_t row = 0; row < segment.head_rows; ++row) {
      rows.push_back(segment.head_starts[head] + row);
    }
  }
  return rows;
}

// A layout without segments is a single head: the whole matrix.
std::vector<Segment> segments_of(const Layout& layout, int64_t length) {
  if (!layout.segments.empty()) return layout.segments;
  return {
      {.name = "matrix",
       .head_starts = {0},
       .head_rows = length,
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

ShapedSlot plan_segment(
    const Weight& weight, const MatrixShape& shape, const Segment& segment,
    const StepOptions& options) {
  const auto& grouping = grouping_at(segment.schedule, weight.step);
  const RandomKey key{options.seed, weight.step, parameter_key(weight.partition), segment.stream};
  const bool by_rows = weight.layout.axis == Axis::kRows;
  const auto side = [&](int64_t extent) {
    return by_rows ? std::pair{extent, shape.cols} : std::pair{shape.rows, extent};
  };
  const auto [rows, cols] = side(grouping.group_size * segment.head_rows);
  const auto [segment_rows, segment_cols] = side(segment.num_rows());
  Slot slot;
  slot.axis = by_rows ? 0 : 1;
  slot.rows = rows_in_order(segment, head_order(segment.num_heads(), grouping, key));
  slot.groups = segment.num_heads() / grouping.group_size;
  slot.transpose = rows > cols;
  slot.scale = update_scale(
      options.scale, out_in(weight.layout, rows, cols),
      out_in(weight.layout, segment_rows, segment_cols),
      out_in(weight.layout, shape.rows, shape.cols));
  return {std::move(slot), rows, cols};
}

// Whether a SIMD engine can read and write the weight in place: contiguous fp32, heads along rows.
bool can_be_in_place(const Weight& weight, const OrthogonalizeOptions& options) {
  const auto fits = [](const Tensor& tensor) {
    return tensor.is_cpu() && tensor.scalar_type() == at::kFloat && tensor.is_contiguous() &&
           !tensor.is_neg();
  };
  return options.engine != Engine::kPortable && weight.layout.axis == Axis::kRows &&
         fits(weight.value) && fits(weight.grad) && fits(weight.momentum);
}

}  // namespace

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
  const auto shape = shape_of(weight);
  const int64_t length = weight.layout.axis == Axis::kRows ? shape.rows : shape.cols;
  std::vector<Slot> slots;
  for (const auto& segment : segments_of(weight.layout, length)) {
    slots.push_back(plan_segment(weight, shape, segment, options).slot);
    slots.back().matrices = shape.count;
  }
  return slots;
}

Plan make_plan(
    const std::vector<Weight>& weights, const StepOptions& options, int64_t max_elements) {
  Plan plan;
  auto& buckets = plan.buckets;
  std::map<std::tuple<int64_t, int64_t, std::string, at::ScalarType, bool>, size_t> open;
  for (size_t i = 0; i < weights.size(); ++i) {
    const auto& weight = weights[i];
    if (weight.value.numel() == 0) continue;
    const auto shape = shape_of(weight);
    const int64_t length = weight.layout.axis == Axis::kRows ? shape.rows : shape.cols;
    const auto& momentum = weight.momentum;
    const auto orthogonalize = resolved(options.orthogonalize, momentum.device());
    const bool in_place = can_be_in_place(weight, orthogonalize);
    if (!in_place) plan.gathered.push_back(i);
    for (const auto& segment : segments_of(weight.layout, length)) {
      const auto [slot, rows, cols] = plan_segment(weight, shape, segment, options);
      const auto [short_side, long_side] = std::minmax(rows, cols);
      const auto key = std::tuple{
          short_side, long_side, momentum.device().str(), momentum.scalar_type(), in_place};
      const int64_t max_blocks =
          in_place ? std::numeric_limits<int64_t>::max() : max_elements / (short_side * long_side);
      // Stacked matrices may be split over several buckets.
      for (int64_t matrix = 0; matrix < shape.count;) {
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
        part.matrices = std::min(room, shape.count - matrix);
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
