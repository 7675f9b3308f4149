#include "group_muon/cost.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>

#include "group_muon/engine_portable.h"
#include "group_muon/engine_simd.h"

namespace group_muon {
namespace {

// Values of a weight's size that are read or written per element: gradient, momentum twice, weight twice; AdamW has two
// averages.
constexpr double kMuonPasses = 5, kAdamwPasses = 7;
constexpr double kMuonState = 1, kAdamwState = 2;

double elements_of(const SharedWeight& weight) {
  double elements = 1;
  for (const auto size : weight.sizes) elements *= static_cast<double>(size);
  return elements;
}

double element_size(const SharedWeight& weight) {
  return static_cast<double>(c10::elementSize(weight.dtype));
}

double bytes_of(const std::vector<SharedWeight>& weights) {
  double bytes = 0;
  for (const auto& weight : weights) bytes += elements_of(weight) * element_size(weight);
  return bytes;
}

double flops_of_lines(int64_t lines, int64_t length, const OrthogonalizeOptions& options) {
  const auto [short_side, long_side] = std::minmax(lines, length);
  return block_flops(short_side, long_side, options);
}

// FLOPs of some heads of a segment. `length` is that of a line.
double flops_of_heads(
    const Segment& segment, int64_t heads, int64_t length, const OrthogonalizeOptions& options) {
  double most = 0;
  for (const auto& grouping : segment.schedule) {
    const double blocks = static_cast<double>(heads) / static_cast<double>(grouping.group_size);
    most = std::max(
        most, blocks * flops_of_lines(grouping.group_size * segment.head_rows, length, options));
  }
  return most;
}

int64_t line_length(const SharedWeight& weight, const MatrixShape& shape) {
  return weight.layout.axis == Axis::kRows ? shape.cols : shape.rows;
}

// FLOPs of one of the weight's matrices.
double flops_of_matrix(const SharedWeight& weight, const OrthogonalizeOptions& options) {
  const auto shape = matrix_shape(weight.sizes, weight.layout, weight.name);
  if (weight.layout.segments.empty()) return flops_of_lines(shape.rows, shape.cols, options);
  double flops = 0;
  for (const auto& segment : weight.layout.segments) {
    flops += flops_of_heads(segment, segment.num_heads(), line_length(weight, shape), options);
  }
  return flops;
}

// FLOPs of all its matrices.
double flops_of_stack(const SharedWeight& weight, const OrthogonalizeOptions& options) {
  const auto shape = matrix_shape(weight.sizes, weight.layout, weight.name);
  return static_cast<double>(shape.count) * flops_of_matrix(weight, options);
}

double flops_of_piece(
    const SharedWeight& weight, const Piece& piece, const OrthogonalizeOptions& options) {
  if (weight.adamw) return 0;
  const auto matrices = static_cast<double>(piece.matrices);
  if (piece.heads.empty()) return matrices * flops_of_matrix(weight, options);
  const auto shape = matrix_shape(weight.sizes, weight.layout, weight.name);
  const auto heads = static_cast<int64_t>(piece.heads.size());
  return matrices *
         flops_of_heads(
             weight.layout.segments.at(piece.segment), heads, line_length(weight, shape), options);
}

// Elementwise work and state of some elements of a weight.
void add_elements(const SharedWeight& weight, double elements, ProcessCost& process) {
  const double bytes = elements * element_size(weight);
  process.memory += bytes * (weight.adamw ? kAdamwPasses : kMuonPasses);
  process.state += bytes * (weight.adamw ? kAdamwState : kMuonState);
}

// What Exchange sends: which weights have gradients, gradients to their owners, own values to all.
StepCost owned_cost(
    const std::vector<SharedWeight>& weights, int processes, bool sends_gradients,
    const OrthogonalizeOptions& options) {
  StepCost cost{std::vector<ProcessCost>(processes)};
  std::vector<double> owned(processes, 0);  // bytes
  for (const auto& piece : share_weights(weights, processes)) {
    const auto& weight = weights[piece.weight];
    auto& process = cost.processes[piece.owner];
    const auto elements = static_cast<double>(piece.elements);
    owned[piece.owner] += elements * element_size(weight);
    process.flops += flops_of_piece(weight, piece, options);
    add_elements(weight, elements, process);
  }
  const double all = bytes_of(weights), others = processes - 1;
  const double flags = static_cast<double>(weights.size() * sizeof(int64_t)) * others;
  for (int i = 0; i < processes; ++i) {
    const double gradients = sends_gradients ? all - owned[i] : 0;
    cost.processes[i].sent = flags + gradients + owned[i] * others;
  }
  return cost;
}

// Blocks of a matrix that can be computed apart from all others.
struct BlockSet {
  double flops = 0, bytes = 0;
  int64_t first = 0, last = 0;  // places in dimension 0
};

std::vector<BlockSet> block_sets(const SharedWeight& weight, const OrthogonalizeOptions& options) {
  const auto shape = matrix_shape(weight.sizes, weight.layout, weight.name);
  const double bytes = elements_of(weight) * element_size(weight);
  std::vector<BlockSet> sets;
  const int64_t end = weight.sizes[0] - 1;
  if (weight.layout.segments.empty()) return {{flops_of_matrix(weight, options), bytes, 0, end}};
  const bool by_rows = weight.layout.axis == Axis::kRows && weight.sizes[0] == shape.rows;
  const double lines = static_cast<double>(by_rows ? shape.rows : shape.cols);
  for (const auto& segment : weight.layout.segments) {
    for (const auto& heads : heads_apart(weight, segment)) {
      const auto count = static_cast<int64_t>(heads.size());
      BlockSet set{
          flops_of_heads(segment, count, line_length(weight, shape), options),
          bytes * static_cast<double>(count * segment.head_rows) / lines, 0, end};
      if (by_rows) {
        set.first = segment.head_starts[heads.front()];
        set.last = set.first + segment.head_rows - 1;
        for (const auto head : heads) {
          const auto start = segment.head_starts[head];
          set.first = std::min(set.first, start);
          set.last = std::max(set.last, start + segment.head_rows - 1);
        }
      }
      sets.push_back(set);
    }
  }
  return sets;
}

// Each shard has ⌈n/N⌉ places of dimension 0, the last ones fewer or none.
StepCost sharded_cost(
    const std::vector<SharedWeight>& weights, int processes, const OrthogonalizeOptions& options) {
  StepCost cost{std::vector<ProcessCost>(processes)};
  const double count = processes;
  std::vector<double> moving;  // FLOPs of sets that lie in several shards
  double moving_bytes = 0;
  for (const auto& weight : weights) {
    const double elements = elements_of(weight);
    if (elements == 0) continue;
    const int64_t places = weight.sizes.empty() ? 1 : weight.sizes[0];
    const int64_t shard = (places + processes - 1) / processes;
    const bool stack =
        !weight.adamw && matrix_shape(weight.sizes, weight.layout, weight.name).count > 1;
    const double flops = stack ? flops_of_stack(weight, options) : 0;
    for (int64_t first = 0; first < places; first += shard) {
      const auto part =
          static_cast<double>(std::min(shard, places - first)) / static_cast<double>(places);
      auto& process = cost.processes[first / shard];
      add_elements(weight, elements * part, process);
      process.flops += flops * part;  // every matrix of a stack lies in one shard
    }
    if (weight.adamw || stack) continue;
    for (const auto& set : block_sets(weight, options)) {
      if (set.first / shard == set.last / shard) {
        cost.processes[set.first / shard].flops += set.flops;
      } else {
        moving.push_back(set.flops);
        moving_bytes += set.bytes;
      }
    }
  }
  // The most expensive first, each to the process with the least to do.
  std::sort(moving.begin(), moving.end(), std::greater<>());
  using Loaded = std::pair<double, int>;
  std::priority_queue<Loaded, std::vector<Loaded>, std::greater<>> least;
  for (int i = 0; i < processes; ++i) least.emplace(cost.processes[i].flops, i);
  for (const auto flops : moving) {
    const int owner = least.top().second;
    least.pop();
    cost.processes[owner].flops += flops;
    least.emplace(cost.processes[owner].flops, owner);
  }
  // A process sends what it has of other owners' blocks, and updates of its own blocks to all who have parts of them.
  for (auto& process : cost.processes) {
    process.sent = 2 * (count - 1) / (count * count) * moving_bytes;
  }
  return cost;
}

// Every process computes everything. FSDP2 shards state and elementwise work.
StepCost repeated_cost(
    const std::vector<SharedWeight>& weights, int processes, bool sharded,
    const OrthogonalizeOptions& options) {
  StepCost cost{std::vector<ProcessCost>(processes)};
  if (sharded) cost = sharded_cost(weights, processes, options);
  ProcessCost all;
  double matrices = 0;  // bytes
  for (const auto& weight : weights) {
    add_elements(weight, elements_of(weight), all);
    if (weight.adamw || elements_of(weight) == 0) continue;
    matrices += elements_of(weight) * element_size(weight);
    all.flops += flops_of_stack(weight, options);
  }
  const double count = processes;
  for (auto& process : cost.processes) {
    if (!sharded) process = all;
    process.flops = all.flops;
    process.sent = sharded ? (count - 1) / count * matrices : 0;
  }
  return cost;
}

}  // namespace

double block_flops(int64_t short_side, int64_t long_side, const OrthogonalizeOptions& options) {
  TORCH_CHECK_VALUE(
      options.method != Method::kExact && options.method != Method::kAuto,
      "group_muon: the cost of method ", method_name(options.method),
      " cannot be estimated: use newton_schulz, gram or accurate_gram");
  const auto m = static_cast<double>(short_side), n = static_cast<double>(long_side);
  const double gram = 2 * m * m * n, square = 2 * m * m * m;  // XXᵀ and QX, R²
  const auto steps = static_cast<int64_t>(options.coefficients.size());
  if (options.method == Method::kNewtonSchulz) {
    return static_cast<double>(steps) * (2 * gram + square);
  }
  const bool ours = options.engine != Engine::kPortable;
  const double symmetric = ours ? 0.5 : 1;  // of a symmetric product is computed
  auto bounds =
      ours ? restarts_for(short_side, long_side, options).of_others : portable_restarts(options);
  bounds.push_back(steps);
  double flops = 0;
  int64_t begin = 0;
  for (const auto bound : bounds) {
    // k steps of a phase: k times Z, k - 1 times Q, RZ and R. XXᵀ before them and QX after them.
    const auto products = static_cast<double>(4 * (bound - begin) - 3);
    flops += symmetric * (gram + products * square) + gram;
    begin = bound;
  }
  return flops;
}

StepCost step_cost(
    const std::vector<SharedWeight>& weights, int processes, StepSharing sharing,
    const OrthogonalizeOptions& options) {
  TORCH_CHECK_VALUE(
      processes > 0, "group_muon: there should be 1 process or more, not ", processes);
  const double bytes = bytes_of(weights), count = processes;
  const double pass = (count - 1) / count * bytes;  // half an all-reduce
  StepCost cost;
  switch (sharing) {
    case StepSharing::kLocal:
    case StepSharing::kAveraged:
      cost = owned_cost(weights, processes, sharing == StepSharing::kLocal, options);
      break;
    case StepSharing::kSharded:
      cost = sharded_cost(weights, processes, options);
      break;
    case StepSharing::kGathered:
    case StepSharing::kRedundant:
      cost = repeated_cost(weights, processes, sharing == StepSharing::kGathered, options);
      break;
  }
  const bool sharded = sharing == StepSharing::kSharded || sharing == StepSharing::kGathered;
  if (sharded) {
    cost.framework_sent = 3 * pass;  // weights for forward and backward, gradients
  } else if (sharing != StepSharing::kLocal) {
    cost.framework_sent = 2 * pass;
  }
  return cost;
}

double largest(const StepCost& cost, double ProcessCost::* member) {
  double value = 0;
  for (const auto& process : cost.processes) value = std::max(value, process.*member);
  return value;
}

double mean(const StepCost& cost, double ProcessCost::* member) {
  double sum = 0;
  for (const auto& process : cost.processes) sum += process.*member;
  return sum / static_cast<double>(cost.processes.size());
}

double seconds_of(const StepCost& cost, const Speed& speed) {
  double slowest = 0;
  for (const auto& process : cost.processes) {
    slowest = std::max(
        slowest, process.flops / speed.flops + process.memory / speed.memory +
                     (process.sent + cost.framework_sent) / speed.network);
  }
  return slowest;
}

}  // namespace group_muon
