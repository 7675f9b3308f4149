#pragma once
// The plan of a step: which rows of which weights form each block, and which engine computes it. Blocks of the same
// shape are batched, whichever weights they come from.

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "group_muon/iteration.h"
#include "group_muon/layout.h"
#include "group_muon/scale.h"

namespace group_muon {

/// Some heads of a segment, which one process owns (sharing.h).
struct OwnedHeads {
  MatrixShape whole;           // of the weight that they belong to
  size_t segment = 0;          // its index in the layout
  std::vector<int64_t> heads;  // ascending
};

/// Conversion from and to text: matrices, rows and columns of the whole weight, segment, heads: `1x2304x768/0/0-1-5`.
OwnedHeads parse_owned_heads(std::string_view text);
std::string to_string(const OwnedHeads& owned);

/// A weight and everything its step reads. `momentum` and `value` are written in place.
struct Weight {
  at::Tensor value;
  at::Tensor grad;
  at::Tensor momentum;
  Layout layout;          // checked() against the weight's sizes
  std::string name;       // used in messages
  std::string partition;  // name of its random partitions; weights with the same name share them
  int64_t step = 0;       // number of earlier steps of this weight
  double lr = 0;
  double weight_decay = 0;
  double lr_fraction =
      1;  // lr as a fraction of the full learning rate, on which groupings may depend
  /// If the tensors hold only these heads, one after the other. The layout is that of the whole weight.
  std::optional<OwnedHeads> owned = {};
};

/// Options that weights must share to be stepped together.
struct StepOptions {
  double momentum = 0.95;
  bool nesterov = true;
  bool average = false;  // M ← μM + (1-μ)G instead of μM + G
  uint64_t seed = 0;
  ScaleOptions scale;
  bool match_spectral = false;  // a segment's update gets the spectral norm of its largest block
  bool row_balance = false;     // output neurons of a block get equal norms before
  OrthogonalizeOptions orthogonalize;

  bool operator==(const StepOptions&) const = default;
};

/// The groups of one segment, contiguous in a bucket.
struct Slot {
  size_t weight = 0;          // index into the list of weights
  int64_t axis = 0;           // 0: heads along rows, 1: along columns
  std::vector<int64_t> rows;  // the segment's rows (or columns), group by group
  at::Tensor index = {};      // the same on the weight's device, after upload_rows()
  int64_t first_matrix = 0;   // first of the stacked matrices in this slot
  int64_t matrices = 1;       // number of matrices
  int64_t groups = 1;         // per matrix
  int64_t first_block = 0;    // position in the bucket
  bool transpose = false;     // blocks are taller than wide: the bucket holds their transposes
  double scale = 1;           // factor on lr

  int64_t blocks() const { return matrices * groups; }
};

/// Blocks of one oriented shape (short side first), orthogonalized in one call. Buckets are independent, so they
/// could also be distributed over processes.
struct Bucket {
  int64_t short_side = 0;
  int64_t long_side = 0;
  int64_t blocks = 0;
  at::TensorOptions momentum;          // device and dtype, the same for all blocks
  OrthogonalizeOptions orthogonalize;  // resolved() for the device
  bool in_place = false;               // the engine reads and writes the weights in place
  std::vector<Slot> slots;
};

struct Plan {
  std::vector<Bucket> buckets;
  std::vector<size_t> gathered;  // weights whose blocks are gathered and put back
};

/// The weight's tensors as matrices.
MatrixShape shape_of(const Weight& weight);

/// The groups of each segment of a weight at its step.
std::vector<Slot> slots_of(const Weight& weight, const StepOptions& options);

/// Whether our own engine steps the weight in place, without gathering its blocks.
bool is_stepped_in_place(const Weight& weight, const StepOptions& options);

/// Plans a step. Reads no tensor data. A gathered bucket holds at most about `max_elements`: 32 MB in fp32 stay close
/// to the cache, and the workspace does not grow with the model.
Plan make_plan(
    const std::vector<Weight>& weights, const StepOptions& options,
    int64_t max_elements = int64_t{1} << 23);

/// Rejects weights that cannot be stepped (`average`: as in StepOptions). The error names the parameter.
void check_value(const at::Tensor& value, const std::string& name, bool average);

/// Rejects a gradient or momentum that does not fit the weight.
void check_grad(const at::Tensor& value, const at::Tensor& grad, const std::string& name);
void check_momentum(const at::Tensor& value, const at::Tensor& momentum, const std::string& name);

}  // namespace group_muon
