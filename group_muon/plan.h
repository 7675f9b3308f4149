#pragma once
// The plan of a step: which rows of which weights form which block, and which engine takes it. Blocks of one shape go
// together, whatever weight they come from.

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include <cstdint>
#include <string>
#include <vector>

#include "group_muon/iteration.h"
#include "group_muon/layout.h"
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

/// Blocks of one oriented shape (short side first), orthogonalized in one call. A bucket needs nothing of another, so it
/// is also what processes can share out.
struct Bucket {
  int64_t short_side = 0;
  int64_t long_side = 0;
  int64_t blocks = 0;
  at::TensorOptions momentum;  // device and dtype of what is gathered; neither mixes in a bucket
  OrthogonalizeOptions orthogonalize;  // resolved() for the device
  bool in_place = false;               // the engine reads and writes the weights where they are
  std::vector<Slot> slots;
};

struct Plan {
  std::vector<Bucket> buckets;
  std::vector<size_t> gathered;  // weights whose blocks are gathered, and put back
};

/// The weight's matrices.
MatrixShape shape_of(const Weight& weight);

/// The groups of each segment of a weight at its step.
std::vector<Slot> slots_of(const Weight& weight, const StepOptions& options);

/// No tensor is read but for its shape and device. A bucket that is gathered is closed at `max_elements`: 32 MB in fp32
/// stay in reach of the cache, and workspace does not grow with the model.
Plan make_plan(
    const std::vector<Weight>& weights, const StepOptions& options,
    int64_t max_elements = int64_t{1} << 23);

/// Refuses weights that cannot be stepped (`average`: as in StepOptions), naming the parameter.
void check_value(const at::Tensor& value, const std::string& name, bool average);

/// Refuses a gradient, or a momentum, that does not fit the weight.
void check_grad(const at::Tensor& value, const at::Tensor& grad, const std::string& name);
void check_momentum(const at::Tensor& value, const at::Tensor& momentum, const std::string& name);

}  // namespace group_muon
