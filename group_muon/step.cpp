#include "group_muon/step.h"

#include <ATen/ATen.h>

#include <cmath>

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
  return options.average ? at::lerp(grad.to(momentum.scalar_type()), momentum, options.momentum)
                         : at::add(grad, momentum, options.momentum);
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

// Momentum, orthogonalization and update of a bucket, block by block, with the weights in place.
template <typename T>
void step_in_place(
    const Bucket& bucket, const std::vector<Weight>& weights, const StepOptions& options) {
  const Engine engine = bucket.orthogonalize.engine;
  const MomentumRule rule{static_cast<float>(options.momentum), options.nesterov, options.average};
  const int64_t size = bucket.short_side * bucket.long_side;
  std::vector<SimdBlock<T>> blocks;
  for (const auto& slot : bucket.slots) {
    const auto& weight = weights[slot.weight];
    // The kernels bypass autograd, so tell it about the writes.
    weight.value.unsafeGetTensorImpl()->bump_version();
    weight.momentum.unsafeGetTensorImpl()->bump_version();
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
               [=, &rule, &bucket](T* block) {
                 const double squares = momentum_pass(engine, map, rule, grad, momentum, block);
                 return normalization(std::sqrt(squares), block, size, bucket.orthogonalize);
               },
           .store = [=](const T* block) { update_pass(engine, map, decay, rate, block, value); }});
    }
  }
  orthogonalize_simd(blocks, bucket.orthogonalize);
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
    slot_of_bucket(blocks, slot)
        .copy_(direction(
            take_blocks(weight.momentum, weight, slot), take_blocks(weight.grad, weight, slot),
            options));
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
    const auto orthogonalization = with_rank_tolerance(  // gathering hides the momentum's dtype
        bucket.orthogonalize, c10::typeMetaToScalarType(bucket.momentum.dtype()),
        bucket.long_side);
    const Tensor blocks = gather(bucket, weights, options);
    apply(bucket, orthogonalize(blocks, orthogonalization), weights);
  }
}

}  // namespace group_muon
