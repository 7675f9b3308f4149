#pragma once
// Layouts: where the heads of a weight lie, as data. The factories below only fill in numbers.

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "group_muon/grouping.h"

namespace group_muon {

/// Axis of the stored matrix along which heads are laid out.
enum class Axis { kRows, kColumns };

/// How a weight with more than two dimensions is read as matrices.
enum class HigherDims {
  kAuto,     // 3 dimensions: kStack; more: kFlatten
  kStack,    // leading dimensions index matrices, as in expert weights (experts × out × in)
  kFlatten,  // out × everything else, as in convolutions
};

/// Heads of equal size that may share a group: the queries of a layer, its keys, its values, …
struct Segment {
  std::string name = {};                  // used in messages and to set the grouping
  std::vector<int64_t> head_starts = {};  // first row (or column) of each head
  int64_t head_rows = 0;                  // rows (or columns) of one head
  GroupingSchedule schedule = {Grouping{}};
  int64_t stream = 0;  // segments with the same number draw the same random partition

  int64_t num_heads() const { return static_cast<int64_t>(head_starts.size()); }
  int64_t num_rows() const { return num_heads() * head_rows; }
  bool operator==(const Segment&) const = default;
};

/// The segments of a weight; together they cover its axis exactly once. Without segments the whole
/// matrix is one block: plain Muon.
struct Layout {
  Axis axis = Axis::kRows;
  bool transposed = false;  // stored as in × out; matters for the learning-rate scale
  HigherDims higher_dims = HigherDims::kAuto;
  std::vector<Segment> segments = {};

  bool operator==(const Layout&) const = default;
};

/// Declared sizes of an attention layer. A kv_heads of 0 means heads, a value_dim of 0 means head_dim.
struct AttentionShape {
  int64_t heads = 0;
  int64_t head_dim = 0;
  int64_t kv_heads = 0;   // fewer than heads: grouped-query attention; 1: multi-query attention
  int64_t value_dim = 0;  // rows of one value head
};

/// Groupings of queries, keys and values. With `share_qk`, Q and K draw the same random partition.
struct QkvGrouping {
  GroupingSchedule q = {Grouping{}};
  GroupingSchedule k = {Grouping{}};
  GroupingSchedule v = {Grouping{}};
  bool share_qk = false;
};

/// One block: plain Muon. Also the packed Full-QKV baseline, where Q, K and V are one matrix.
Layout plain();
/// A convolution's weight: out × (in · kernel), one block.
Layout convolution();
/// All query heads, then all key heads, then all value heads (GPT-2, nanoGPT). 12 heads of 64:
/// Q rows 0 … 767, K rows 768 … 1535, V rows 1536 … 2303.
Layout packed_qkv(const AttentionShape& shape, const QkvGrouping& grouping = {});
/// `[q, k, v]` per head (GPT-NeoX); with fewer KV heads, `[q … q, k, v]` per KV head.
Layout interleaved_qkv(const AttentionShape& shape, const QkvGrouping& grouping = {});
/// A projection on its own (Q, K or V): the heads one below the other.
Layout separate(
    int64_t heads, int64_t head_dim, const GroupingSchedule& grouping = {Grouping{}},
    const std::string& name = "heads");
/// Multi-head latent attention, query up-projection: `[nope, rope]` per head.
Layout mla_query(
    int64_t heads, int64_t nope_dim, int64_t rope_dim,
    const GroupingSchedule& grouping = {Grouping{}});
/// Multi-head latent attention, key-value up-projection: `[k, v]` per head.
Layout mla_key_value(
    int64_t heads, int64_t nope_dim, int64_t value_dim, const GroupingSchedule& k = {Grouping{}},
    const GroupingSchedule& v = {Grouping{}});
/// The output projection, whose heads lie along the columns.
Layout output_projection(
    int64_t heads, int64_t value_dim, const GroupingSchedule& grouping = {Grouping{}});
/// The same weight stored as in × out (Hugging Face's Conv1D): heads move to the other axis.
Layout transposed(Layout layout);
/// Applies the layout to each matrix of a weight with leading dimensions (experts × out × in).
Layout stacked(Layout layout);

/// The same weight, stored the same way, as one block (packed).
Layout as_one_block(Layout layout);

/// Whether the layout has a segment with this name ("": any segment).
bool has_segment(const Layout& layout, std::string_view segment);

/// The same layout with another grouping for the segments with this name ("": all segments).
Layout with_grouping(
    Layout layout, const GroupingSchedule& grouping, std::string_view segment = {});

/// A weight read as `count` matrices of `rows` × `cols`.
struct MatrixShape {
  int64_t count = 1;
  int64_t rows = 0;
  int64_t cols = 0;
};

/// How a weight of these sizes is read. If it is not a matrix, the error names the parameter.
MatrixShape matrix_shape(c10::IntArrayRef sizes, const Layout& layout, std::string_view parameter);

/// Checks the layout against the weight's sizes and replaces every "all" by the number of heads. Errors
/// name the parameter, the value and what would be valid.
Layout checked(Layout layout, c10::IntArrayRef sizes, std::string_view parameter);

/// Conversion from and to text, one token per segment: name=heads x rows @ first + stride / grouping. Example:
/// `rows q=12x64@0+64/6:random k=12x64@768+64/6:random~1 v=12x64@1536+64/all~2` (the stream follows ~).
Layout parse_layout(std::string_view text);
std::string to_string(const Layout& layout);

}  // namespace group_muon
