#include "group_muon/blocks.h"

#include <ATen/ATen.h>

#include <map>
#include <string>
#include <vector>

namespace group_muon {
namespace {

using at::Tensor;

// A weight-shaped tensor as [matrices, rows, cols]: a view if its strides allow.
Tensor as_matrices(const Tensor& tensor, const Weight& weight) {
  const auto shape = shape_of(weight);
  return tensor.reshape({shape.count, shape.rows, shape.cols});
}

Tensor slot_matrices(const Tensor& matrices, const Slot& slot) {
  return matrices.narrow(0, slot.first_matrix, slot.matrices);
}

bool is_run(const std::vector<int64_t>& rows) {
  for (size_t i = 1; i < rows.size(); ++i) {
    if (rows[i] != rows[0] + static_cast<int64_t>(i)) return false;
  }
  return true;
}

Tensor index_of(const Slot& slot, at::Device device) {
  return slot.index.defined() ? slot.index : at::tensor(slot.rows, at::kLong).to(device);
}

Tensor select_rows(const Tensor& matrices, const Slot& slot) {
  const int64_t dim = 1 + slot.axis;
  if (is_run(slot.rows)) {
    return matrices.narrow(dim, slot.rows[0], static_cast<int64_t>(slot.rows.size()));
  }
  return matrices.index_select(dim, index_of(slot, matrices.device()));
}

// matrices[rows] += factor · update
void add_rows(const Tensor& matrices, const Slot& slot, const Tensor& update, double factor) {
  const int64_t dim = 1 + slot.axis;
  const auto dtype = matrices.scalar_type();
  if (is_run(slot.rows)) {
    add_scaled(select_rows(matrices, slot), update, factor);
  } else if (
      at::isReducedFloatingType(dtype) || at::promote_types(dtype, update.scalar_type()) != dtype) {
    Tensor rows = select_rows(matrices, slot);  // index_add_ would round the update first
    add_scaled(rows, update, factor);
    matrices.index_copy_(dim, index_of(slot, matrices.device()), rows);
  } else {
    matrices.index_add_(dim, index_of(slot, matrices.device()), update.to(dtype), factor);
  }
}

// [matrices, segment rows, cols] ↔ [matrices, groups, block rows, cols], or the same along columns.
Tensor split_groups(const Tensor& matrices, const Slot& slot) {
  if (slot.axis == 0) return matrices.unflatten(1, {slot.groups, -1});
  return matrices.unflatten(2, {slot.groups, -1}).permute({0, 2, 1, 3});
}
Tensor merge_groups(const Tensor& blocks, const Slot& slot) {
  if (slot.axis == 0) return blocks.flatten(1, 2);
  return blocks.permute({0, 2, 1, 3}).flatten(2, 3);
}

}  // namespace

Tensor at_least_fp32(const Tensor& tensor) {
  return at::isReducedFloatingType(tensor.scalar_type()) ? tensor.to(at::kFloat) : tensor;
}

void add_scaled(const Tensor& tensor, const Tensor& update, double factor) {
  const bool reduced = at::isReducedFloatingType(tensor.scalar_type());
  tensor.add_(reduced ? at_least_fp32(update) : update, factor);
}

Tensor as_lines(const Tensor& tensor, const Weight& weight) {
  const Tensor matrices = as_matrices(tensor, weight);
  return weight.layout.axis == Axis::kRows ? matrices : matrices.mT();
}

void upload_rows(Plan& plan) {
  std::map<std::string, std::vector<Slot*>> by_device;
  for (auto& bucket : plan.buckets) {
    if (bucket.in_place) continue;
    for (auto& slot : bucket.slots) {
      if (!is_run(slot.rows)) by_device[bucket.momentum.device().str()].push_back(&slot);
    }
  }
  for (auto& [device, slots] : by_device) {
    std::vector<int64_t> rows;
    for (const auto* slot : slots) rows.insert(rows.end(), slot->rows.begin(), slot->rows.end());
    const Tensor uploaded = at::tensor(rows, at::kLong).to(at::Device(device));
    int64_t first = 0;
    for (auto* slot : slots) {
      const auto count = static_cast<int64_t>(slot->rows.size());
      slot->index = uploaded.narrow(0, first, count);
      first += count;
    }
  }
}

Tensor take_blocks(const Tensor& tensor, const Weight& weight, const Slot& slot) {
  return split_groups(select_rows(slot_matrices(as_matrices(tensor, weight), slot), slot), slot);
}

void add_blocks(
    const Tensor& tensor, const Weight& weight, const Slot& slot, const Tensor& blocks,
    double factor) {
  const Tensor matrices = as_matrices(tensor, weight);
  add_rows(slot_matrices(matrices, slot), slot, merge_groups(blocks, slot), factor);
  if (!matrices.is_alias_of(tensor)) tensor.copy_(matrices.view_as(tensor));
}

Tensor slot_of_bucket(const Tensor& bucket, const Slot& slot) {
  const Tensor blocks = bucket.narrow(0, slot.first_block, slot.blocks());
  return (slot.transpose ? blocks.mT() : blocks).unflatten(0, {-1, slot.groups});
}

}  // namespace group_muon
