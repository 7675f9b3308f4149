#include "group_muon/step.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <tuple>

#include "group_muon/cpu_gram.h"
#include "group_muon/passes.h"

namespace group_muon {
namespace {

using at::Tensor;
using c10::BFloat16;

MatrixShape shape_of(const Weight& weight) {
  return matrix_shape(weight.value.sizes(), weight.layout, weight.name);
}

// A weight-shaped tensor as [matrices, rows, cols]: a view wherever its strides allow.
Tensor as_matrices(const Tensor& tensor, const Weight& weight) {
  const auto shape = shape_of(weight);
  return tensor.reshape({shape.count, shape.rows, shape.cols});
}

Tensor slot_matrices(const Tensor& matrices, const Slot& slot) {
  return matrices.narrow(0, slot.first_matrix, slot.matrices);
}

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

bool is_run(const std::vector<int64_t>& rows) {
  for (size_t i = 1; i < rows.size(); ++i) {
    if (rows[i] != rows[0] + static_cast<int64_t>(i)) return false;
  }
  return true;
}

Tensor index_tensor(const std::vector<int64_t>& rows, at::Device device) {
  return at::tensor(rows, at::kLong).to(device);
}

Tensor select_rows(const Tensor& matrices, const Slot& slot) {
  const int64_t dim = 1 + slot.axis;
  if (is_run(slot.rows)) {
    return matrices.narrow(dim, slot.rows[0], static_cast<int64_t>(slot.rows.size()));
  }
  return matrices.index_select(dim, index_tensor(slot.rows, matrices.device()));
}

// matrices[rows] += factor · update
void add_rows(const Tensor& matrices, const Slot& slot, const Tensor& update, double factor) {
  if (is_run(slot.rows)) {
    select_rows(matrices, slot).add_(update, factor);
  } else {
    const Tensor index = index_tensor(slot.rows, matrices.device());
    matrices.index_add_(1 + slot.axis, index, update.to(matrices.scalar_type()), factor);
  }
}

// A layout without segments is one head that is the whole matrix.
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

// The slot of one segment; its blocks are rows × cols before they are turned on their side.
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

// The blocks of a slot as a view of the bucket in the segment's own shape and orientation:
// [matrices, groups, block rows, block cols].
Tensor slot_blocks(const Slot& slot, const Tensor& bucket) {
  const Tensor blocks = bucket.narrow(0, slot.first_block, slot.blocks());
  return (slot.transpose ? blocks.mT() : blocks).unflatten(0, {-1, slot.groups});
}

// What is orthogonalized: the momentum, or its Nesterov look-ahead.
Tensor direction(const Tensor& momentum, const Tensor& grad, const StepOptions& options) {
  if (!options.nesterov) return momentum;
  return options.average ? at::lerp(grad.to(momentum.scalar_type()), momentum, options.momentum)
                         : at::add(grad, momentum, options.momentum);
}

// [matrices, segment rows, cols] ↔ [matrices, groups, block rows, cols], or the same on columns.
Tensor split_groups(const Tensor& matrices, const Slot& slot) {
  if (slot.axis == 0) return matrices.unflatten(1, {slot.groups, -1});
  return matrices.unflatten(2, {slot.groups, -1}).permute({0, 2, 1, 3});
}
Tensor merge_groups(const Tensor& blocks, const Slot& slot) {
  if (slot.axis == 0) return blocks.flatten(1, 2);
  return blocks.permute({0, 2, 1, 3}).flatten(2, 3);
}

// Whether a weight's rows lie as the passes over memory want them, and its blocks can take the CPU's own
// products.
bool can_use_cpu_kernels(const Weight& weight, const StepOptions& options) {
  const auto fits = [](const Tensor& tensor) {
    return tensor.is_cpu() && tensor.scalar_type() == at::kFloat && tensor.is_contiguous() &&
           !tensor.is_neg();
  };
  return fits(weight.value) && fits(weight.grad) && fits(weight.momentum) &&
         weight.layout.axis == Axis::kRows && can_use_cpu_gram(options.orthogonalize);
}

// What makes a block of this norm one of norm 1. A block whose squares could leave fp32 is scaled itself.
float normalization(
    double norm, BFloat16* block, int64_t size, const OrthogonalizeOptions& options) {
  if (norm == 0) return 1;
  const double factor = options.relative_eps ? 1 / (1 + options.eps) : norm / (norm + options.eps);
  if (norm >= kSmallestNorm && norm <= kLargestNorm) return static_cast<float>(factor / norm);
  const bool finite = std::isfinite(norm);
  for (int64_t i = 0; i < size; ++i) {
    block[i] = finite ? static_cast<float>(static_cast<double>(block[i]) / norm) : NAN;
  }
  return static_cast<float>(factor);
}

}  // namespace

void check_value(const Tensor& value, const std::string& name, bool average) {
  TORCH_CHECK_TYPE(
      value.layout() == at::kStrided, "group_muon: parameter '", name, "' is ", value.layout(),
      ", but Group Muon steps dense (strided) weights only");
  TORCH_CHECK_TYPE(
      value.is_floating_point(), "group_muon: parameter '", name, "' is ", value.scalar_type(),
      ", but Group Muon steps real floating-point weights only");
  TORCH_CHECK_TYPE(
      value.scalar_type() != at::kHalf || average, "group_muon: parameter '", name,
      "' is Half, in which momentum as a sum overflows; use average momentum, or keep weights in ",
      "bfloat16 or float32");
}

void check_grad(const Tensor& value, const Tensor& grad, const std::string& name) {
  TORCH_CHECK_TYPE(
      grad.layout() == at::kStrided, "group_muon: parameter '", name,
      "' has a sparse gradient, but Group Muon needs dense ones");
  TORCH_CHECK_VALUE(
      grad.sizes() == value.sizes(), "group_muon: parameter '", name, "' has shape ", value.sizes(),
      ", but its gradient has ", grad.sizes());
}

void check_momentum(const Tensor& value, const Tensor& momentum, const std::string& name) {
  TORCH_CHECK_VALUE(
      momentum.sizes() == value.sizes(), "group_muon: parameter '", name, "' has shape ",
      value.sizes(), ", but its momentum has ", momentum.sizes());
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

Tensor as_lines(const Tensor& tensor, const Weight& weight) {
  const Tensor matrices = as_matrices(tensor, weight);
  return weight.layout.axis == Axis::kRows ? matrices : matrices.mT();
}

void accumulate_momentum(const std::vector<Weight>& weights, const StepOptions& options) {
  if (weights.empty()) return;
  std::vector<Tensor> buffers, grads;
  for (const auto& weight : weights) {
    buffers.push_back(weight.momentum);
    grads.push_back(weight.grad.to(weight.momentum.scalar_type()));
  }
  if (options.average) {
    at::_foreach_lerp_(buffers, grads, 1 - options.momentum);
  } else {
    at::_foreach_mul_(buffers, options.momentum);
    at::_foreach_add_(buffers, grads);
  }
}

Tensor look_ahead(const Weight& weight, const StepOptions& options) {
  const at::NoGradGuard no_grad;
  Weight copy = weight;
  copy.momentum = weight.momentum.clone();
  accumulate_momentum({copy}, options);
  return direction(copy.momentum, weight.grad, options);
}

std::vector<Bucket> make_plan(
    const std::vector<Weight>& weights, const StepOptions& options, int64_t max_elements) {
  std::vector<Bucket> buckets;
  std::map<std::tuple<int64_t, int64_t, std::string, at::ScalarType, bool>, size_t> open;
  for (size_t i = 0; i < weights.size(); ++i) {
    const auto& weight = weights[i];
    if (weight.value.numel() == 0) continue;
    const auto shape = shape_of(weight);
    const int64_t length = weight.layout.axis == Axis::kRows ? shape.rows : shape.cols;
    const auto& momentum = weight.momentum;
    const bool on_cpu_kernels = can_use_cpu_kernels(weight, options);
    for (const auto& segment : segments_of(weight.layout, length)) {
      const auto [slot, rows, cols] = plan_segment(weight, shape, segment, options);
      const auto [short_side, long_side] = std::minmax(rows, cols);
      const auto key = std::tuple{
          short_side, long_side, momentum.device().str(), momentum.scalar_type(), on_cpu_kernels};
      const int64_t max_blocks = on_cpu_kernels ? std::numeric_limits<int64_t>::max()
                                                : max_elements / (short_side * long_side);
      // Stacked matrices may go to several buckets.
      for (int64_t matrix = 0; matrix < shape.count;) {
        const auto found = open.find(key);
        int64_t room =
            found == open.end() ? 0 : (max_blocks - buckets[found->second].blocks) / slot.groups;
        if (room < 1) {
          open[key] = buckets.size();
          buckets.push_back({short_side, long_side, 0, momentum.options(), on_cpu_kernels, {}});
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
  return buckets;
}

Tensor gather(
    const Bucket& bucket, const std::vector<Weight>& weights, const StepOptions& options) {
  const auto dtype = bucket.momentum.dtype() == at::kDouble ? at::kDouble : at::kFloat;
  Tensor blocks =
      at::empty({bucket.blocks, bucket.short_side, bucket.long_side}, bucket.momentum.dtype(dtype));
  for (const auto& slot : bucket.slots) {
    const auto& weight = weights[slot.weight];
    const auto slot_of = [&](const Tensor& tensor) {
      return split_groups(
          select_rows(slot_matrices(as_matrices(tensor, weight), slot), slot), slot);
    };
    slot_blocks(slot, blocks)
        .copy_(direction(slot_of(weight.momentum), slot_of(weight.grad), options));
  }
  return blocks;
}

void apply(const Bucket& bucket, const Tensor& blocks, const std::vector<Weight>& weights) {
  for (const auto& slot : bucket.slots) {
    const auto& weight = weights[slot.weight];
    const Tensor matrices = as_matrices(weight.value, weight);
    const Tensor update = merge_groups(slot_blocks(slot, blocks), slot);
    add_rows(slot_matrices(matrices, slot), slot, update, -weight.lr * slot.scale);
    if (!matrices.is_alias_of(weight.value)) weight.value.copy_(matrices.view_as(weight.value));
  }
}

void step_on_cpu(
    const Bucket& bucket, const std::vector<Weight>& weights, const StepOptions& options) {
  const MomentumRule rule{static_cast<float>(options.momentum), options.nesterov, options.average};
  const int64_t size = bucket.short_side * bucket.long_side;
  std::vector<GramBlock> blocks;
  for (const auto& slot : bucket.slots) {
    const auto& weight = weights[slot.weight];
    const auto shape = shape_of(weight);
    const auto* grad = weight.grad.const_data_ptr<float>();
    auto* momentum = weight.momentum.data_ptr<float>();
    auto* value = weight.value.data_ptr<float>();
    const auto decay = static_cast<float>(1 - weight.lr * weight.weight_decay);
    const auto rate = static_cast<float>(weight.lr * slot.scale);
    const auto rows = static_cast<int64_t>(slot.rows.size()) / slot.groups;
    for (int64_t i = 0; i < slot.blocks(); ++i) {
      const RowMap map{
          c10::ArrayRef<int64_t>(slot.rows).slice(i % slot.groups * rows, rows),
          (slot.first_matrix + i / slot.groups) * shape.rows, shape.cols};
      blocks.push_back(
          {.rows = rows,
           .cols = shape.cols,
           .load =
               [=, &rule, &options](BFloat16* block) {
                 const double squares = momentum_pass(map, rule, grad, momentum, block);
                 return normalization(std::sqrt(squares), block, size, options.orthogonalize);
               },
           .store = [=](const BFloat16* block) { update_pass(map, decay, rate, block, value); }});
    }
  }
  cpu_gram(blocks, options.orthogonalize);
}

void step(const std::vector<Weight>& weights, const StepOptions& options) {
  const at::NoGradGuard no_grad;
  std::vector<Weight> others;
  for (const auto& weight : weights) {
    if (!can_use_cpu_kernels(weight, options)) {
      others.push_back(weight);
      continue;
    }
    // Kernels write past autograd, which should know.
    weight.value.unsafeGetTensorImpl()->bump_version();
    weight.momentum.unsafeGetTensorImpl()->bump_version();
  }
  accumulate_momentum(others, options);
  for (const auto& weight : others) {
    if (weight.weight_decay != 0) weight.value.mul_(1 - weight.lr * weight.weight_decay);
  }
  for (const auto& bucket : make_plan(weights, options)) {
    if (bucket.on_cpu_kernels) {
      step_on_cpu(bucket, weights, options);
      continue;
    }
    const auto orthogonalization = with_rank_tolerance(  // gathering hides how coarse the momentum is
        options.orthogonalize, c10::typeMetaToScalarType(bucket.momentum.dtype()),
        bucket.long_side);
    const Tensor blocks = gather(bucket, weights, options);
    apply(bucket, orthogonalize(blocks, orthogonalization), weights);
  }
}

}  // namespace group_muon
