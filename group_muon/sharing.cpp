#include "group_muon/sharing.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>

#include "group_muon/text.h"

namespace group_muon {
namespace {

using at::Tensor;

// Operations per element of elementwise work, which waits for memory: momentum and update, AdamW.
constexpr double kElementWork = 60;
// No piece of Muon's has more than this fraction of an even share, if its weight can be cut: the processes' shares then
// differ little.
constexpr double kLargestPiece = 0.25;
// AdamW's pieces begin at multiples of this many elements, so that vectorized kernels compute each element alike.
constexpr int64_t kAligned = 64;

MatrixShape shape_of(const SharedWeight& weight) {
  return matrix_shape(weight.sizes, weight.layout, weight.name);
}

int64_t elements_of(const SharedWeight& weight) { return c10::multiply_integers(weight.sizes); }

// Length of a line, and the number of lines that heads are cut from.
struct Lines {
  int64_t count;
  int64_t length;
};
Lines lines_of(const SharedWeight& weight) {
  const auto shape = shape_of(weight);
  return weight.layout.axis == Axis::kRows ? Lines{shape.rows, shape.cols}
                                           : Lines{shape.cols, shape.rows};
}

double work_of_block(int64_t lines, int64_t length) {
  return block_work(std::min(lines, length), std::max(lines, length));
}

// Work of some heads of a segment in one matrix. A schedule's most expensive grouping counts.
double heads_work(const SharedWeight& weight, const Segment& segment, int64_t heads) {
  const int64_t length = lines_of(weight).length;
  double most = 0;
  for (const auto& grouping : segment.schedule) {
    const double blocks = static_cast<double>(heads) / static_cast<double>(grouping.group_size);
    most = std::max(most, blocks * work_of_block(grouping.group_size * segment.head_rows, length));
  }
  return most;
}

double matrix_work(const SharedWeight& weight) {
  const auto [count, length] = lines_of(weight);
  if (weight.layout.segments.empty()) return work_of_block(count, length);
  double work = 0;
  for (const auto& segment : weight.layout.segments) {
    work += heads_work(weight, segment, segment.num_heads());
  }
  return work;
}

Piece whole(const SharedWeight& weight, size_t index) {
  Piece piece;
  piece.weight = index;
  piece.elements = elements_of(weight);
  piece.work = update_work(weight);
  if (!weight.adamw) piece.matrices = shape_of(weight).count;
  return piece;
}

// Ranges of stacked matrices.
void cut_stack(const Piece& all, double largest, std::vector<Piece>& pieces) {
  const auto total = static_cast<double>(all.matrices);
  const int64_t most = std::max<int64_t>(1, static_cast<int64_t>(largest / all.work * total));
  for (int64_t first = 0; first < all.matrices; first += most) {
    Piece piece = all;
    piece.first_matrix = first;
    piece.matrices = std::min(most, all.matrices - first);
    piece.elements = all.elements / all.matrices * piece.matrices;
    piece.work = all.work / total * static_cast<double>(piece.matrices);
    pieces.push_back(piece);
  }
}

// These heads of a segment, in one matrix.
Piece piece_of_heads(const SharedWeight& weight, size_t index, std::vector<int64_t> heads) {
  const auto& segment = weight.layout.segments.at(index);
  const auto number = static_cast<int64_t>(heads.size());
  Piece piece;
  piece.segment = index;
  std::sort(heads.begin(), heads.end());
  piece.heads = std::move(heads);
  piece.elements = number * segment.head_rows * lines_of(weight).length;
  piece.work = heads_work(weight, segment, number);
  return piece;
}

// Heads of each segment, in sets that no group ever crosses. Neighbouring sets stay together while they are small.
void cut_heads(
    const SharedWeight& weight, const Piece& all, double largest, std::vector<Piece>& pieces) {
  for (size_t i = 0; i < weight.layout.segments.size(); ++i) {
    const auto& segment = weight.layout.segments[i];
    const auto add = [&](std::vector<int64_t> heads) {
      pieces.push_back(piece_of_heads(weight, i, std::move(heads)));
      pieces.back().weight = all.weight;
    };
    std::vector<int64_t> heads;
    for (const auto& set : heads_apart(weight, segment)) {
      const auto together = static_cast<int64_t>(heads.size() + set.size());
      if (!heads.empty() && heads_work(weight, segment, together) > largest) {
        add(std::exchange(heads, {}));
      }
      heads.insert(heads.end(), set.begin(), set.end());
    }
    add(std::move(heads));
  }
}

void cut(const SharedWeight& weight, size_t index, double largest, std::vector<Piece>& pieces) {
  const Piece all = whole(weight, index);
  if (all.elements == 0) return;
  if (all.work > largest && all.matrices > 1) {
    cut_stack(all, largest, pieces);
  } else if (all.work > largest && !weight.layout.segments.empty()) {
    cut_heads(weight, all, largest, pieces);
  } else {
    pieces.push_back(all);
  }
}

// Gives each piece to the process with the least work, the most expensive piece first.
void give_out(std::vector<Piece>& pieces, int processes) {
  std::vector<size_t> order(pieces.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return pieces[a].work > pieces[b].work;
  });
  using Loaded = std::pair<double, int>;  // work, process
  std::priority_queue<Loaded, std::vector<Loaded>, std::greater<>> least;
  for (int i = 0; i < processes; ++i) least.emplace(0, i);
  for (const auto i : order) {
    const auto [work, owner] = least.top();
    least.pop();
    pieces[i].owner = owner;
    least.emplace(work + pieces[i].work, owner);
  }
}

// How many of `extra` elements each process gets, so that those with the fewest catch up.
std::vector<int64_t> fill_up(const std::vector<int64_t>& owned, int64_t extra) {
  auto sorted = owned;
  std::sort(sorted.begin(), sorted.end());
  int64_t below = 0, level = 0;
  for (size_t i = 0; i < sorted.size(); ++i) {  // the first i + 1 reach the same level
    below += sorted[i];
    const auto count = static_cast<int64_t>(i) + 1;
    level = (below + extra + count - 1) / count;
    if (i + 1 == sorted.size() || level <= sorted[i + 1]) break;
  }
  std::vector<int64_t> shares;
  for (const auto elements : owned) shares.push_back(std::max<int64_t>(0, level - elements));
  return shares;
}

void share_adamw(
    const std::vector<SharedWeight>& weights, int processes, std::vector<Piece>& pieces) {
  std::vector<int64_t> owned(processes, 0);
  for (const auto& piece : pieces) owned[piece.owner] += piece.elements;
  int64_t extra = 0;
  for (const auto& weight : weights) extra += weight.adamw ? elements_of(weight) : 0;
  const auto shares = fill_up(owned, extra);
  int owner = 0;
  int64_t left = shares[0];  // what the owner still gets
  for (size_t i = 0; i < weights.size(); ++i) {
    if (!weights[i].adamw) continue;
    const int64_t elements = elements_of(weights[i]);
    for (int64_t first = 0; first < elements;) {
      while (left <= 0 && owner + 1 < processes) left += shares[++owner];
      const bool last = owner + 1 == processes;
      const int64_t wanted = (left + kAligned - 1) / kAligned * kAligned;
      const int64_t count = last ? elements - first : std::min(wanted, elements - first);
      Piece piece = whole(weights[i], i);
      piece.work *= static_cast<double>(count) / static_cast<double>(elements);
      piece.owner = owner;
      piece.elements = count;
      piece.first_element = first;
      pieces.push_back(piece);
      first += count;
      left -= count;
    }
  }
}

// The piece's rows (or columns) in the weight.
std::vector<int64_t> lines_of_piece(const SharedWeight& weight, const Piece& piece) {
  const auto& segment = weight.layout.segments.at(piece.segment);
  std::vector<int64_t> lines;
  for (const auto head : piece.heads) {
    for (int64_t i = 0; i < segment.head_rows; ++i) {
      lines.push_back(segment.head_starts[head] + i);
    }
  }
  return lines;
}

// The dimension of [matrices, rows, cols] along which heads lie.
int64_t dimension_of(const SharedWeight& weight) {
  return weight.layout.axis == Axis::kRows ? 1 : 2;
}

// The matrices of a Muon piece, whole: [matrices, rows, cols].
Tensor matrices_of(const Tensor& tensor, const SharedWeight& weight, const Piece& piece) {
  const auto shape = shape_of(weight);
  return tensor.reshape({shape.count, shape.rows, shape.cols})
      .narrow(0, piece.first_matrix, piece.matrices);
}

// Lines that follow each other: the first of them, or -1.
int64_t run_of(const std::vector<int64_t>& lines) {
  for (size_t i = 1; i < lines.size(); ++i) {
    if (lines[i] != lines[i - 1] + 1) return -1;
  }
  return lines[0];
}

}  // namespace

double block_work(int64_t m, int64_t n) {
  const auto rows = static_cast<double>(m), cols = static_cast<double>(n);
  // XXᵀ of which half is computed, its square, and a product with X, five times.
  const double iterations = 5 * (rows * rows * cols + rows * rows * rows + 2 * rows * rows * cols);
  return iterations + kElementWork * rows * cols;
}

double update_work(const SharedWeight& weight) {
  const auto elements = static_cast<double>(elements_of(weight));
  if (weight.adamw || elements == 0) return kElementWork * elements;
  return matrix_work(weight) * static_cast<double>(shape_of(weight).count);
}

std::vector<std::vector<int64_t>> heads_apart(const SharedWeight& weight, const Segment& segment) {
  const int64_t count = segment.num_heads();
  const GroupingSchedule all = {{.group_size = count}};
  return separable_heads(count, weight.whole_segments ? all : segment.schedule);
}

std::vector<Piece> smallest_pieces(const SharedWeight& weight) {
  if (weight.layout.segments.empty()) {
    Piece piece = whole(weight, 0);
    const auto stacked = piece.matrices;
    piece.matrices = 1;
    piece.elements /= std::max<int64_t>(1, stacked);
    piece.work /= static_cast<double>(std::max<int64_t>(1, stacked));
    return {piece};
  }
  std::vector<Piece> pieces;
  for (size_t i = 0; i < weight.layout.segments.size(); ++i) {
    const auto& segment = weight.layout.segments[i];
    for (auto& heads : heads_apart(weight, segment)) {
      pieces.push_back(piece_of_heads(weight, i, std::move(heads)));
    }
  }
  return pieces;
}

std::vector<int64_t> runs_of_lines(const SharedWeight& weight, const Piece& piece) {
  if (piece.heads.empty()) return {0, lines_of(weight).count};
  const auto& segment = weight.layout.segments.at(piece.segment);
  std::vector<int64_t> runs;
  for (const auto head : piece.heads) {
    const auto first = segment.head_starts[head];
    if (!runs.empty() && runs.back() + runs[runs.size() - 2] == first) {
      runs.back() += segment.head_rows;
    } else {
      runs.insert(runs.end(), {first, segment.head_rows});
    }
  }
  return runs;
}

std::vector<Piece> share_weights(const std::vector<SharedWeight>& weights, int processes) {
  TORCH_CHECK_VALUE(
      processes > 0, "group_muon: there should be 1 process or more, not ", processes);
  double total = 0;
  for (const auto& weight : weights) total += weight.adamw ? 0 : update_work(weight);
  const double largest = processes == 1 ? total : total / processes * kLargestPiece;
  std::vector<Piece> pieces;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (!weights[i].adamw) cut(weights[i], i, largest, pieces);
  }
  give_out(pieces, processes);
  share_adamw(weights, processes, pieces);
  return pieces;
}

std::vector<int64_t> piece_sizes(const SharedWeight& weight, const Piece& piece) {
  if (piece.elements == elements_of(weight)) return weight.sizes;
  if (weight.adamw) return {piece.elements};
  const auto shape = shape_of(weight);
  std::vector<int64_t> sizes = {piece.matrices, shape.rows, shape.cols};
  if (!piece.heads.empty()) {
    sizes[dimension_of(weight)] = static_cast<int64_t>(piece.heads.size()) *
                                  weight.layout.segments.at(piece.segment).head_rows;
  }
  if (shape.count == 1) sizes.erase(sizes.begin());
  return sizes;
}

Tensor take_piece(const Tensor& tensor, const SharedWeight& weight, const Piece& piece) {
  if (piece.elements == elements_of(weight)) return tensor;
  if (weight.adamw) return tensor.reshape({-1}).narrow(0, piece.first_element, piece.elements);
  Tensor matrices = matrices_of(tensor, weight, piece);
  if (!piece.heads.empty()) {
    const auto lines = lines_of_piece(weight, piece);
    const auto first = run_of(lines), count = static_cast<int64_t>(lines.size());
    const int64_t dimension = dimension_of(weight);
    matrices = first >= 0 ? matrices.narrow(dimension, first, count)
                          : matrices.index_select(
                                dimension, at::tensor(lines, at::kLong).to(matrices.device()));
  }
  return shape_of(weight).count == 1 ? matrices.squeeze(0) : matrices;
}

void put_piece(
    const Tensor& tensor, const SharedWeight& weight, const Piece& piece, const Tensor& values) {
  if (piece.elements == elements_of(weight)) {
    tensor.copy_(values.reshape(weight.sizes));
    return;
  }
  if (!tensor.is_contiguous()) {  // then it cannot be viewed as matrices
    const Tensor copy = tensor.contiguous();
    put_piece(copy, weight, piece, values);
    tensor.copy_(copy);
    return;
  }
  Tensor target = weight.adamw ? tensor.view({-1}).narrow(0, piece.first_element, piece.elements)
                               : matrices_of(tensor, weight, piece);
  if (piece.heads.empty()) {
    target.copy_(values.reshape(target.sizes()));
    return;
  }
  const auto lines = lines_of_piece(weight, piece);
  const int64_t dimension = dimension_of(weight), count = static_cast<int64_t>(lines.size());
  auto sizes = target.sizes().vec();
  sizes[dimension] = count;
  if (const auto first = run_of(lines); first >= 0) {
    target.narrow(dimension, first, count).copy_(values.reshape(sizes));
  } else {
    const Tensor index = at::tensor(lines, at::kLong).to(target.device());
    target.index_copy_(dimension, index, values.reshape(sizes).to(target.scalar_type()));
  }
}

std::optional<OwnedHeads> owned_heads(const SharedWeight& weight, const Piece& piece) {
  if (piece.heads.empty()) return {};
  return OwnedHeads{shape_of(weight), piece.segment, piece.heads};
}

std::vector<int64_t> fingerprints(
    const std::vector<SharedWeight>& weights, const std::vector<Piece>& pieces) {
  std::vector<std::string> texts;
  for (const auto& [name, sizes, dtype, adamw, layout, whole_segments] : weights) {
    texts.push_back(
        c10::str(
            name, ' ', join(sizes, "x"), ' ', c10::toString(dtype), ' ',
            adamw ? "adamw" : to_string(layout), whole_segments ? " whole" : ""));
  }
  for (const auto& piece : pieces) {
    texts[piece.weight] += c10::str(
        ' ', piece.owner, ':', piece.first_element, '+', piece.elements, ' ', piece.first_matrix,
        '+', piece.matrices, ' ', piece.segment, '/', join(piece.heads, ","));
  }
  std::vector<int64_t> result;
  for (const auto& text : texts) result.push_back(static_cast<int64_t>(parameter_key(text)));
  return result;
}

}  // namespace group_muon
