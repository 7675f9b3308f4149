#pragma once
// Takes blocks of heads out of weight-shaped tensors and puts them back.

#include <ATen/core/Tensor.h>

#include "group_muon/plan.h"

namespace group_muon {

/// A weight-shaped tensor as [matrices, lines, line length]. Lines are rows, or columns if heads lie along columns.
at::Tensor as_lines(const at::Tensor& tensor, const Weight& weight);

/// Copies the rows of all slots whose blocks are gathered to their device, in one copy per device. Rows that are a run
/// need none. Without it each use of a slot copies its rows.
void upload_rows(Plan& plan);

/// A slot's blocks of a weight-shaped tensor: [matrices, groups, block rows, block cols]. A view if possible.
at::Tensor take_blocks(const at::Tensor& tensor, const Weight& weight, const Slot& slot);

/// Adds factor · blocks to their rows (or columns) of a weight-shaped tensor.
void add_blocks(
    const at::Tensor& tensor, const Weight& weight, const Slot& slot, const at::Tensor& blocks,
    double factor);

/// The tensor, in fp32 if it has fewer bits. torch's bf16 kernels round a factor for some elements of a tensor and not for
/// others, depending on where they lie; arithmetic with fp32 does not.
at::Tensor at_least_fp32(const at::Tensor& tensor);

/// tensor += factor · update, computed for each element alike.
void add_scaled(const at::Tensor& tensor, const at::Tensor& update, double factor);

/// A slot's blocks of a bucket ([blocks, short, long]), in the shape of take_blocks(). A view.
at::Tensor slot_of_bucket(const at::Tensor& bucket, const Slot& slot);

}  // namespace group_muon
