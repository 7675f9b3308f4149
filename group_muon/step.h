#pragma once
// One Group Muon step over a list of weights (Algorithm 1), in four parts:
//   accumulate_momentum → make_plan → per bucket: gather, orthogonalize → apply
// Blocks of one shape are batched across all weights, whatever weight they come from.

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include <cstdint>
#include <string>
#include <vector>

#include "group_muon/layout.h"
#include "group_muon/orthogonalize.h"
#include "group_muon/scale.h"

namespace group_muon {

/// A weight and all that its step reads. `momentum` and `value` are written in place.
struct Weight {
  at::Tensor value;
  at::Tensor grad;
  at::Tensor momentum;
  Layout layout;          // checked() against the value's sizes
  std::string name;       // in messages
  std::string partition;  // names its random partitions; weights with one name share them
  int64_t step = 0;       // steps this weight has seen before this one
  double lr = 0;
  double weight_decay = 0;
};

/// What weights must have in common to be stepped together.
struct StepOptions {
  double momentum = 0.95;
  bool nesterov = true;
  bool average = false;  // M ← μM + (1-μ)G instead of μM + G
  uint64_t seed = 0;
  ScaleOptions scale;
  OrthogonalizeOptions orthogonalize;

  bool operator==(const StepOptions&) const = default;
};

/// The groups of one segment, which lie one after the other in a bucket.
struct Slot {
  size_t weight = 0;          // index into the list of weights
  int64_t axis = 0;           // 0: heads along rows, 1: along columns
  std::vector<int64_t> rows;  // the segment's rows (or columns), group after group
  int64_t first_matrix = 0;   // of stacked matrices, those from this one on …
  int64_t matrices = 1;       // … so many
  int64_t groups = 1;         // per matrix
  int64_t first_block = 0;    // place in the bucket
  bool transpose = false;     // blocks are taller than wide: they enter the bucket on their side
  double scale = 1;           // factor on lr

  int64_t blocks() const { return matrices * groups; }
};

/// Blocks of one oriented shape (short side first), orthogonalized in one call.
struct Bucket {
  int64_t short_side = 0;
  int64_t long_side = 0;
  int64_t blocks = 0;
  at::TensorOptions momentum;   // device and dtype of what is gathered; neither mixes in a bucket
  bool on_cpu_kernels = false;  // nor do blocks that can take the way of step_on_cpu with others
  std::vector<Slot> slots;
};

/// The groups of each segment of a weight at its step.
std::vector<Slot> slots_of(const Weight& weight, const StepOptions& options);

/// A weight-shaped tensor as [matrices, lines, length of one]: lines are rows, or columns where heads lie along
/// those.
at::Tensor as_lines(const at::Tensor& tensor, const Weight& weight);

/// Adds the gradients to the momentum. Elementwise, so it knows nothing of heads.
void accumulate_momentum(const std::vector<Weight>& weights, const StepOptions& options);

/// What a step would orthogonalize: the momentum with this gradient in it, or its look-ahead. Nothing is changed.
at::Tensor look_ahead(const Weight& weight, const StepOptions& options);

/// Which rows form which block at this step. No tensor is read but for its shape and device.
/// A bucket that is gathered is closed at `max_elements`: 32 MB in fp32 stay in reach of the cache, and
/// workspace does not grow with the model.
std::vector<Bucket> make_plan(
    const std::vector<Weight>& weights, const StepOptions& options,
    int64_t max_elements = int64_t{1} << 23);

/// The bucket's blocks of momentum, or of its Nesterov look-ahead: [blocks, short, long].
at::Tensor gather(
    const Bucket& bucket, const std::vector<Weight>& weights, const StepOptions& options);

/// weight -= lr · scale · block, each block back to the rows it came from.
void apply(const Bucket& bucket, const at::Tensor& blocks, const std::vector<Weight>& weights);

/// Momentum, orthogonalization and update of such a bucket, block by block.
void step_on_cpu(
    const Bucket& bucket, const std::vector<Weight>& weights, const StepOptions& options);

/// The whole step.
void step(const std::vector<Weight>& weights, const StepOptions& options);

/// Refuses weights that cannot be stepped (`average`: as in StepOptions), naming the parameter.
void check_value(const at::Tensor& value, const std::string& name, bool average);

/// Refuses a gradient, or a momentum, that does not fit the weight.
void check_grad(const at::Tensor& value, const at::Tensor& grad, const std::string& name);
void check_momentum(const at::Tensor& value, const at::Tensor& momentum, const std::string& name);

}  // namespace group_muon
