#pragma once
// Which process owns what. Weights are cut into pieces, and each piece belongs to one process, which keeps its state and
// computes its update. The plan follows from shapes and layouts alone, so every process makes the same one.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "group_muon/layout.h"
#include "group_muon/plan.h"

namespace group_muon {

/// What the plan has to know about a weight.
struct SharedWeight {
  std::string name;
  std::vector<int64_t> sizes;
  c10::ScalarType dtype = c10::ScalarType::Float;
  bool adamw = false;  // stepped by AdamW: may be cut anywhere
  Layout layout = {};  // Muon's weights, checked(): may be cut between groups of heads
  bool whole_segments =
      false;  // the steps of a segment's heads depend on each other (match_spectral)
};

/// A piece of a weight.
struct Piece {
  size_t weight = 0;  // index in the list
  int owner = 0;
  int64_t elements = 0;
  double work = 0;  // estimated operations of its update

  // AdamW: `elements` of the flattened weight, starting here.
  int64_t first_element = 0;
  // Muon: these of the stacked matrices; in each of them all heads, or some of one segment.
  int64_t first_matrix = 0;
  int64_t matrices = 1;
  size_t segment = 0;
  std::vector<int64_t> heads = {};  // ascending; empty: all of all segments

  bool operator==(const Piece&) const = default;
};

/// Estimated operations of orthogonalizing an m × n block (m ≤ n) with five iterations, and of its momentum and update.
double block_work(int64_t m, int64_t n);

/// Estimated operations of a whole weight's update.
double update_work(const SharedWeight& weight);

/// The smallest sets of a segment's heads that can be stepped separately.
std::vector<std::vector<int64_t>> heads_apart(const SharedWeight& weight, const Segment& segment);

/// The smallest pieces of the first of a weight's stacked matrices that can be stepped separately: sets of
/// heads_apart(); without segments the whole matrix. Nobody owns them yet.
std::vector<Piece> smallest_pieces(const SharedWeight& weight);

/// The rows (or columns) of a matrix that a piece has, in ascending order of its heads: first and number of each run.
std::vector<int64_t> runs_of_lines(const SharedWeight& weight, const Piece& piece);

/// Cuts the weights and gives each piece to a process: Muon's pieces by work, the most expensive first, each to the process
/// with the least; a weight is cut if it is too large for an even share. AdamW's pieces fill up, so that all processes
/// own about as many elements.
std::vector<Piece> share_weights(const std::vector<SharedWeight>& weights, int processes);

/// Sizes of a piece's tensors: those of the weight if it is all of it; else [matrices, rows, cols] with only its rows (or
/// columns), or a matrix of them; for AdamW a vector.
std::vector<int64_t> piece_sizes(const SharedWeight& weight, const Piece& piece);

/// The piece's elements of a tensor in the shape of its weight. A view where possible.
at::Tensor take_piece(const at::Tensor& tensor, const SharedWeight& weight, const Piece& piece);

/// Writes the piece's elements, given in piece_sizes() or flattened.
void put_piece(
    const at::Tensor& tensor, const SharedWeight& weight, const Piece& piece,
    const at::Tensor& values);

/// What a Weight with the piece's tensors needs to be stepped as the whole weight would be.
std::optional<OwnedHeads> owned_heads(const SharedWeight& weight, const Piece& piece);

/// A fingerprint of each weight with its pieces, the same on every machine.
std::vector<int64_t> fingerprints(
    const std::vector<SharedWeight>& weights, const std::vector<Piece>& pieces);

}  // namespace group_muon
