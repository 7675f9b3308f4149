#include "group_muon/step.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <utility>

#include "group_muon/balance.h"
#include "group_muon/blocks.h"
#include "group_muon/engine_simd.h"
#include "group_muon/orthogonalize.h"
#include "group_muon/passes.h"

namespace group_muon {
namespace {

using at::Tensor;

// The matrix to orthogonalize: the momentum or its Nesterov look-ahead.
Tensor direction(const Tensor& momentum, const Tensor& grad, const StepOptions& options) {
  if (!options.nesterov) return momentum;
  const auto dtype = momentum.scalar_type();
  if (options.average) return at::lerp(grad.to(dtype), momentum, options.momentum);
  return at::add(at_least_fp32(grad), at_least_fp32(momentum), options.momentum).to(dtype);
}

// The factor that normalizes a block of this norm. A block whose squares could leave fp32's range is scaled in place.
template <typename T>
float normalization(double norm, T* block, int64_t size, const OrthogonalizeOptions& options) {
  if (norm == 0) return 1;
  const double factor = options.relative_eps ? 1 / (1 + options.eps) : norm / (norm + options.eps);
  if (norm >= kSmallestNorm && norm <= kLargestNorm) return static_cast<float>(factor / norm);
  const bool finite = std::isfinite(norm);
  for (int64_t i = 0; i < size; ++i) {
    block[i] = finite ? static_cast<float>(static_cast<double>(block[i]) / norm) : NAN;
  }
  return static_cast<float>(factor);
}

MomentumRule momentum_rule(const StepOptions& options) {
  return {static_cast<float>(options.momentum), options.nesterov, options.average};
}

// The kernels bypass autograd, so tell it about their writes.
void bump_version(const Tensor& tensor) { tensor.unsafeGetTensorImpl()->bump_version(); }

float decay_of(const Weight& weight) {
  return static_cast<float>(1 - weight.lr * weight.weight_decay);
}

float rate_of(const Weight& weight, double scale) { return static_cast<float>(weight.lr * scale); }

// Calls visit(slot, rows of a block) for each block of a bucket whose weights are stepped in place.
template <typename Visit>
void for_blocks(const Bucket& bucket, const std::vector<Weight>& weights, Visit visit) {
  for (const auto& slot : bucket.slots) {
    const auto shape = shape_of(weights[slot.weight]);
    const auto rows = static_cast<int64_t>(slot.rows.size()) / slot.groups;
    for (int64_t i = 0; i < slot.blocks(); ++i) {
      visit(
          slot, RowMap{
                    c10::ArrayRef<int64_t>(slot.rows).slice(i % slot.groups * rows, rows),
                    (slot.first_matrix + i / slot.groups) * shape.rows, shape.cols});
    }
  }
}

// A block that an engine reads with momentum_pass() and writes with `store`.
template <typename T>
SimdBlock<T> block_in_place(
    const Bucket& bucket, const RowMap& map, const MomentumRule& rule, const float* grad,
    float* momentum, std::function<void(const T*)> store) {
  const auto rows = static_cast<int64_t>(map.rows.size());
  return {
      .rows = rows,
      .cols = map.cols,
      .load =
          [=, &bucket](T* block) {
            const auto& options = bucket.orthogonalize;
            const double squares = momentum_pass(options.engine, map, rule, grad, momentum, block);
            return normalization(std::sqrt(squares), block, rows * map.cols, options);
          },
      .store = std::move(store)};
}

// Momentum, orthogonalization and update of a bucket, block by block, with the weights in place.
template <typename T>
void step_in_place(
    const Bucket& bucket, const std::vector<Weight>& weights, const StepOptions& options) {
  const Engine engine = bucket.orthogonalize.engine;
  std::vector<SimdBlock<T>> blocks;
  for (const auto& slot : bucket.slots) {
    bump_version(weights[slot.weight].value);
    bump_version(weights[slot.weight].momentum);
  }
  for_blocks(bucket, weights, [&](const Slot& slot, const RowMap& map) {
    const auto& weight = weights[slot.weight];
    const auto decay = decay_of(weight), rate = rate_of(weight, slot.scale);
    auto* value = weight.value.data_ptr<float>();
    blocks.push_back(
        block_in_place<T>(
            bucket, map, momentum_rule(options), weight.grad.const_data_ptr<float>(),
            weight.momentum.data_ptr<float>(),
            [=](const T* block) { update_pass(engine, map, decay, rate, block, value); }));
  });
  orthogonalize_simd(blocks, bucket.orthogonalize);
}

// The blocks of directions, orthogonalized, at the same rows of `results`.
template <typename T>
void orthogonalize_in_place(
    const Bucket& bucket, const std::vector<Weight>& weights, const std::vector<Tensor>& results) {
  std::vector<SimdBlock<T>> blocks;
  for_blocks(bucket, weights, [&](const Slot& slot, const RowMap& map) {
    auto* direction = weights[slot.weight].momentum.template data_ptr<float>();
    auto* result = results[slot.weight].template data_ptr<T>();
    // With a coefficient of 0 the direction, as gradient and as momentum, is unchanged.
    blocks.push_back(
        block_in_place<T>(bucket, map, MomentumRule{}, direction, direction, [=](const T* block) {
          for (size_t i = 0; i < map.rows.size(); ++i) {
            const auto from = static_cast<int64_t>(i) * map.cols;
            std::copy_n(block + from, map.cols, result + (map.first_row + map.rows[i]) * map.cols);
          }
        }));
  });
  orthogonalize_simd(blocks, bucket.orthogonalize);
}

Tensor orthogonalize_gathered(
    const Bucket& bucket, const std::vector<Weight>& weights, const StepOptions& options) {
  const auto orthogonalization = with_rank_tolerance(  // gathering hides the momentum's dtype
      bucket.orthogonalize, c10::typeMetaToScalarType(bucket.momentum.dtype()), bucket.long_side);
  Tensor blocks = orthogonalize(gather(bucket, weights, options), orthogonalization);
  if (options.match_spectral) {
    for (const auto& slot : bucket.slots) {
      match_spectral_norm(slot_of_bucket(blocks, slot), slot.axis);
    }
  }
  return blocks;
}

// Adds the gradient to the momentum with the engine's kernels; returns the direction.
Tensor accumulate_in_place(const Weight& part, const StepOptions& options) {
  Tensor direction = at::empty_like(part.momentum);
  const int64_t cols = shape_of(part).cols;
  std::vector<int64_t> rows(part.value.numel() / cols);
  std::iota(rows.begin(), rows.end(), int64_t{0});
  bump_version(part.momentum);
  momentum_pass(
      resolved(options.orthogonalize, part.momentum.device()).engine, {rows, 0, cols},
      momentum_rule(options), part.grad.const_data_ptr<float>(), part.momentum.data_ptr<float>(),
      direction.data_ptr<float>());
  return direction;
}

// Consecutive lines of a part whose update has the same scale.
struct ScaledLines {
  int64_t first = 0;  // in the part
  int64_t count = 0;
  double scale = 1;
};

std::vector<ScaledLines> scaled_lines(
    const Weight& part, const HeldLines& lines, const StepOptions& options) {
  Weight whole = part;
  whole.value = at::empty(lines.sizes, at::device(at::kMeta));
  const auto shape = shape_of(whole);
  std::vector<double> scales(part.layout.axis == Axis::kRows ? shape.rows : shape.cols);
  for (const auto& slot : slots_of(whole, options)) {
    for (const auto row : slot.rows) scales[row] = slot.scale;
  }
  std::vector<ScaledLines> result;
  int64_t own = 0;
  for (size_t i = 0; i + 1 < lines.runs.size(); i += 2) {
    for (int64_t line = lines.runs[i]; line < lines.runs[i] + lines.runs[i + 1]; ++line, ++own) {
      const double scale = scales.at(line);
      if (result.empty() || result.back().scale != scale) result.push_back({own, 0, scale});
      ++result.back().count;
    }
  }
  return result;
}

template <typename T>
void apply_in_place(
    const Weight& part, const std::vector<ScaledLines>& lines, const Tensor& update,
    const Engine engine) {
  const auto shape = shape_of(part);
  const auto* from = update.const_data_ptr<T>();
  auto* value = part.value.data_ptr<float>();
  std::vector<int64_t> rows(shape.rows);
  std::iota(rows.begin(), rows.end(), int64_t{0});
  bump_version(part.value);
  for (int64_t matrix = 0; matrix < shape.count; ++matrix) {
    for (const auto& [first, count, scale] : lines) {
      const RowMap map{
          c10::ArrayRef<int64_t>(rows).slice(first, count), matrix * shape.rows, shape.cols};
      update_pass(
          engine, map, decay_of(part), rate_of(part, scale),
          from + (map.first_row + first) * shape.cols, value);
    }
  }
}

void apply_gathered(
    const Weight& part, const std::vector<ScaledLines>& lines, const Tensor& update) {
  if (part.weight_decay != 0) part.value.mul_(1 - part.lr * part.weight_decay);
  const auto shape = shape_of(part);
  const int64_t dim = part.layout.axis == Axis::kRows ? 1 : 2;
  const Tensor value = part.value.view({shape.count, shape.rows, shape.cols});
  for (const auto& [first, count, scale] : lines) {
    add_scaled(
        value.narrow(dim, first, count), update.view(value.sizes()).narrow(dim, first, count),
        -part.lr * scale);
  }
}

}  // namespace

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

Tensor gather(
    const Bucket& bucket, const std::vector<Weight>& weights, const StepOptions& options) {
  const auto dtype = bucket.momentum.dtype() == at::kDouble ? at::kDouble : at::kFloat;
  Tensor blocks =
      at::empty({bucket.blocks, bucket.short_side, bucket.long_side}, bucket.momentum.dtype(dtype));
  for (const auto& slot : bucket.slots) {
    const auto& weight = weights[slot.weight];
    const Tensor own = direction(
        take_blocks(weight.momentum, weight, slot), take_blocks(weight.grad, weight, slot),
        options);
    slot_of_bucket(blocks, slot)
        .copy_(options.row_balance ? with_balanced_rows(own, weight.layout.transposed) : own);
  }
  return blocks;
}

void apply(const Bucket& bucket, const Tensor& blocks, const std::vector<Weight>& weights) {
  for (const auto& slot : bucket.slots) {
    const auto& weight = weights[slot.weight];
    add_blocks(weight.value, weight, slot, slot_of_bucket(blocks, slot), -weight.lr * slot.scale);
  }
}

void step(const std::vector<Weight>& weights, const StepOptions& options) {
  const at::NoGradGuard no_grad;
  Plan plan = make_plan(weights, options);
  upload_rows(plan);
  std::vector<Weight> gathered;
  for (const auto i : plan.gathered) gathered.push_back(weights[i]);
  accumulate_momentum(gathered, options);
  for (const auto& weight : gathered) {
    if (weight.weight_decay != 0) weight.value.mul_(1 - weight.lr * weight.weight_decay);
  }
  for (const auto& bucket : plan.buckets) {
    if (bucket.in_place) {
      bucket.orthogonalize.precision == at::kFloat
          ? step_in_place<float>(bucket, weights, options)
          : step_in_place<c10::BFloat16>(bucket, weights, options);
      continue;
    }
    apply(bucket, orthogonalize_gathered(bucket, weights, options), weights);
  }
}

std::vector<Tensor> accumulate_parts(const std::vector<Weight>& parts, const StepOptions& options) {
  const at::NoGradGuard no_grad;
  std::vector<Tensor> directions;
  for (const auto& part : parts) {
    if (part.value.numel() == 0) {
      directions.push_back(at::empty_like(part.momentum));
    } else if (is_stepped_in_place(part, options)) {
      directions.push_back(accumulate_in_place(part, options));
    } else {
      accumulate_momentum({part}, options);
      const Tensor result = direction(part.momentum, part.grad, options);
      directions.push_back(result.is_same(part.momentum) ? result.clone() : result);
    }
  }
  return directions;
}

std::vector<Tensor> orthogonalize_parts(
    const std::vector<Weight>& weights, const StepOptions& options) {
  const at::NoGradGuard no_grad;
  auto as_they_are = options;
  as_they_are.nesterov = false;
  Plan plan = make_plan(weights, as_they_are);
  upload_rows(plan);
  std::vector<Tensor> results;
  for (const auto& weight : weights) {
    const auto precision = resolved(options.orthogonalize, weight.momentum.device()).precision;
    results.push_back(
        at::zeros(weight.momentum.sizes(), weight.momentum.options().dtype(precision)));
  }
  for (const auto& bucket : plan.buckets) {
    if (bucket.in_place) {
      bucket.orthogonalize.precision == at::kFloat
          ? orthogonalize_in_place<float>(bucket, weights, results)
          : orthogonalize_in_place<c10::BFloat16>(bucket, weights, results);
      continue;
    }
    const Tensor blocks = orthogonalize_gathered(bucket, weights, as_they_are);
    for (const auto& slot : bucket.slots) {
      add_blocks(results[slot.weight], weights[slot.weight], slot, slot_of_bucket(blocks, slot), 1);
    }
  }
  return results;
}

void apply_parts(
    const std::vector<Weight>& parts, const std::vector<HeldLines>& lines,
    const std::vector<Tensor>& updates, const StepOptions& options) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto& part = parts[i];
    if (part.value.numel() == 0) continue;
    const auto scaled = scaled_lines(part, lines.at(i), options);
    const auto& update = updates.at(i);
    if (!is_stepped_in_place(part, options)) {
      apply_gathered(part, scaled, update);
      continue;
    }
    const Engine engine = resolved(options.orthogonalize, part.momentum.device()).engine;
    update.scalar_type() == at::kFloat
        ? apply_in_place<float>(part, scaled, update, engine)
        : apply_in_place<c10::BFloat16>(part, scaled, update, engine);
  }
}

}  // namespace group_muon
