#include "group_muon/layout.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>

#include "group_muon/text.h"

namespace group_muon {
namespace {

// first, first + stride, …
std::vector<int64_t> evenly_spaced(int64_t count, int64_t first, int64_t stride) {
  std::vector<int64_t> starts(count);
  for (int64_t i = 0; i < count; ++i) starts[i] = first + i * stride;
  return starts;
}

AttentionShape completed(AttentionShape shape) {
  if (shape.kv_heads == 0) shape.kv_heads = shape.heads;
  if (shape.value_dim == 0) shape.value_dim = shape.head_dim;
  TORCH_CHECK_VALUE(
      shape.heads > 0 && shape.head_dim > 0 && shape.kv_heads > 0 && shape.value_dim > 0,
      "group_muon: heads, head_dim, kv_heads and value_dim should be positive, not ", shape.heads,
      ", ", shape.head_dim, ", ", shape.kv_heads, ", ", shape.value_dim);
  TORCH_CHECK_VALUE(
      shape.heads % shape.kv_heads == 0, "group_muon: ", shape.kv_heads,
      " KV heads do not divide the ", shape.heads, " query heads");
  return shape;
}

int64_t key_stream(const QkvGrouping& grouping) { return grouping.share_qk ? 0 : 1; }

// Interleaved parts of heads: part 0 of head 0, part 1 of head 0, part 0 of head 1, …
Layout alternating(int64_t heads, std::vector<Segment> parts) {
  int64_t stride = 0;
  for (const auto& part : parts) {
    TORCH_CHECK_VALUE(
        heads > 0 && part.head_rows > 0, "group_muon: segment '", part.name, "' has ", heads,
        " heads of ", part.head_rows, " rows; both should be positive");
    stride += part.head_rows;
  }
  int64_t first = 0;
  for (auto& part : parts) {
    part.head_starts = evenly_spaced(heads, first, stride);
    first += part.head_rows;
  }
  return Layout{.segments = std::move(parts)};
}

std::string segment_where(std::string_view parameter, const Segment& segment) {
  return c10::str("group_muon: parameter '", parameter, "', segment '", segment.name, "': ");
}

const char* axis_name(Axis axis) { return axis == Axis::kRows ? "rows" : "columns"; }

// Checks that the segments cover each of 0 … length-1 exactly once.
void check_cover(const Layout& layout, int64_t length, std::string_view parameter) {
  std::vector<std::pair<int64_t, const Segment*>> heads;
  int64_t declared = 0;
  std::string sum;
  for (const auto& segment : layout.segments) {
    declared += segment.num_rows();
    sum += c10::str(
        sum.empty() ? "" : " + ", segment.num_heads(), "×", segment.head_rows, " ", segment.name);
    for (const auto start : segment.head_starts) heads.emplace_back(start, &segment);
  }
  const char* axis = axis_name(layout.axis);
  TORCH_CHECK_VALUE(
      declared == length, "group_muon: parameter '", parameter, "' has ", length, " ", axis,
      ", but its layout declares ", declared, " (", sum,
      "); declare the head counts and sizes of the whole weight");
  std::sort(
      heads.begin(), heads.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  int64_t next = 0;
  for (const auto& [start, segment] : heads) {
    TORCH_CHECK_VALUE(
        start == next, segment_where(parameter, *segment),
        start < next ? "overlaps " : "leaves out ", axis, " ", std::min(start, next), " … ",
        std::max(start, next) - 1, "; segments should cover each of the ", length, " ", axis,
        " exactly once");
    next = start + segment->head_rows;
  }
}

// Limits of what a text may ask for, far above any model's sizes. Sums and products of them fit in 64 bits.
constexpr int64_t kMostHeads = int64_t{1} << 20;  // of all segments together
constexpr int64_t kLargestNumber = std::numeric_limits<int32_t>::max();

int64_t parse_size(std::string_view digits, std::string_view whole) {
  const int64_t value = parse_number(digits, whole);
  TORCH_CHECK_VALUE(
      value <= kLargestNumber, "group_muon: ", value, " in '", whole, "' should be at most ",
      kLargestNumber);
  return value;
}

void check_heads(int64_t count, std::string_view whole) {
  TORCH_CHECK_VALUE(count > 0, "group_muon: layout '", whole, "' has a segment without heads");
  TORCH_CHECK_VALUE(
      count <= kMostHeads, "group_muon: layout '", whole, "' has ", count, " heads; at most ",
      kMostHeads, " are allowed");
}

// "6:random~all/5~1" → {"6:random~all/5", "1"}: the stream has no slash, unlike a periodic grouping.
std::pair<std::string_view, std::string_view> cut_stream(std::string_view text) {
  const auto at = text.rfind('~');
  if (at == std::string_view::npos || text.find('/', at) != std::string_view::npos) {
    return {text, {}};
  }
  return {text.substr(0, at), text.substr(at + 1)};
}

Segment parse_segment(std::string_view text) {
  const auto [name, body] = cut(text, '=');
  const auto [place, rest] = cut(body, '/');
  const auto [grouping, stream] = cut_stream(rest);
  const auto [size, starts] = cut(place, '@');
  const auto [heads, rows] = cut(size, 'x');
  TORCH_CHECK_VALUE(
      !name.empty() && !rows.empty() && !starts.empty() && !grouping.empty(),
      "group_muon: layout segment '", text, "' should look like q=12x64@0+64/6:random");
  Segment segment{.name = std::string(name)};
  segment.head_rows = parse_size(rows, text);
  const int64_t count = parse_number(heads, text);
  check_heads(count, text);
  const auto [first, stride] = cut(starts, '+');
  if (stride.empty()) {
    for (const auto start : split(starts, ',')) {
      segment.head_starts.push_back(parse_size(start, text));
    }
  } else {
    segment.head_starts = evenly_spaced(count, parse_size(first, text), parse_size(stride, text));
  }
  TORCH_CHECK_VALUE(
      segment.num_heads() == count, "group_muon: layout segment '", text, "' declares ", count,
      " heads but lists ", segment.num_heads(), " starts");
  segment.schedule = parse_schedule(grouping);
  if (!stream.empty()) segment.stream = parse_number(stream, text);
  return segment;
}

std::string to_string(const Segment& segment) {
  const auto& starts = segment.head_starts;
  const int64_t stride = starts.size() > 1 ? starts[1] - starts[0] : segment.head_rows;
  const bool even = !starts.empty() && stride >= 0 &&
                    starts == evenly_spaced(segment.num_heads(), starts[0], stride);
  return c10::str(
      segment.name, "=", starts.size(), "x", segment.head_rows, "@",
      even ? c10::str(starts[0], "+", stride) : join(starts, ","), "/", to_string(segment.schedule),
      segment.stream == 0 ? "" : c10::str("~", segment.stream));
}

}  // namespace

Layout plain() { return {}; }

Layout convolution() { return {.higher_dims = HigherDims::kFlatten}; }

Layout packed_qkv(const AttentionShape& shape, const QkvGrouping& grouping) {
  const auto [heads, head_dim, kv_heads, value_dim] = completed(shape);
  const int64_t k = heads * head_dim;
  const int64_t v = k + kv_heads * head_dim;
  return {
      .segments = {
          {"q", evenly_spaced(heads, 0, head_dim), head_dim, grouping.q, 0},
          {"k", evenly_spaced(kv_heads, k, head_dim), head_dim, grouping.k, key_stream(grouping)},
          {"v", evenly_spaced(kv_heads, v, value_dim), value_dim, grouping.v, 2},
      }};
}

Layout interleaved_qkv(const AttentionShape& shape, const QkvGrouping& grouping) {
  const auto [heads, head_dim, kv_heads, value_dim] = completed(shape);
  const int64_t queries = heads / kv_heads;  // query heads per KV head
  const int64_t stride = (queries + 1) * head_dim + value_dim;
  std::vector<int64_t> q;
  for (int64_t group = 0; group < kv_heads; ++group) {
    for (const auto start : evenly_spaced(queries, group * stride, head_dim)) q.push_back(start);
  }
  const int64_t k = queries * head_dim;
  return {
      .segments = {
          {"q", q, head_dim, grouping.q, 0},
          {"k", evenly_spaced(kv_heads, k, stride), head_dim, grouping.k, key_stream(grouping)},
          {"v", evenly_spaced(kv_heads, k + head_dim, stride), value_dim, grouping.v, 2},
      }};
}

Layout separate(
    int64_t heads, int64_t head_dim, const GroupingSchedule& grouping, const std::string& name) {
  return alternating(heads, {{.name = name, .head_rows = head_dim, .schedule = grouping}});
}

Layout mla_query(
    int64_t heads, int64_t nope_dim, int64_t rope_dim, const GroupingSchedule& grouping) {
  return alternating(
      heads, {{.name = "nope", .head_rows = nope_dim, .schedule = grouping},
              {.name = "rope", .head_rows = rope_dim, .schedule = grouping, .stream = 1}});
}

Layout mla_key_value(
    int64_t heads, int64_t nope_dim, int64_t value_dim, const GroupingSchedule& k,
    const GroupingSchedule& v) {
  return alternating(
      heads, {{.name = "k", .head_rows = nope_dim, .schedule = k},
              {.name = "v", .head_rows = value_dim, .schedule = v, .stream = 2}});
}

Layout output_projection(int64_t heads, int64_t value_dim, const GroupingSchedule& grouping) {
  Layout layout = separate(heads, value_dim, grouping, "o");
  layout.axis = Axis::kColumns;
  return layout;
}

Layout transposed(Layout layout) {
  layout.axis = layout.axis == Axis::kRows ? Axis::kColumns : Axis::kRows;
  layout.transposed = !layout.transposed;
  return layout;
}

Layout stacked(Layout layout) {
  layout.higher_dims = HigherDims::kStack;
  return layout;
}

Layout as_one_block(Layout layout) {
  layout.segments.clear();
  return layout;
}

bool has_segment(const Layout& layout, std::string_view segment) {
  return std::any_of(layout.segments.begin(), layout.segments.end(), [&](const Segment& other) {
    return segment.empty() || other.name == segment;
  });
}

Layout with_grouping(Layout layout, const GroupingSchedule& grouping, std::string_view segment) {
  std::string names;
  for (const auto& other : layout.segments) {
    names += c10::str(names.empty() ? "" : ", ", other.name);
  }
  TORCH_CHECK_VALUE(
      has_segment(layout, segment), "group_muon: no segment '", segment,
      "' to group; this layout has ", names.empty() ? "none (the matrix is one block)" : names);
  for (auto& other : layout.segments) {
    if (segment.empty() || other.name == segment) other.schedule = grouping;
  }
  return layout;
}

MatrixShape matrix_shape(c10::IntArrayRef sizes, const Layout& layout, std::string_view parameter) {
  TORCH_CHECK_VALUE(
      sizes.size() >= 2, "group_muon: parameter '", parameter, "' of shape ", sizes, " has ",
      sizes.size(), " dimension(s), but a layout needs a matrix; use AdamW for biases, gains and ",
      "other vectors");
  const auto product = [](c10::IntArrayRef dims) {
    return std::accumulate(dims.begin(), dims.end(), int64_t{1}, std::multiplies<>());
  };
  const bool flatten = layout.higher_dims == HigherDims::kFlatten ||
                       (layout.higher_dims == HigherDims::kAuto && sizes.size() > 3);
  if (flatten) return {1, sizes[0], product(sizes.slice(1))};
  const size_t leading = sizes.size() - 2;
  return {product(sizes.slice(0, leading)), sizes[leading], sizes[leading + 1]};
}

Layout checked(Layout layout, c10::IntArrayRef sizes, std::string_view parameter) {
  const auto shape = matrix_shape(sizes, layout, parameter);
  if (layout.segments.empty()) return layout;
  std::map<int64_t, const Segment*> streams;
  for (auto& segment : layout.segments) {
    const auto where = segment_where(parameter, segment);
    TORCH_CHECK_VALUE(
        segment.num_heads() > 0 && segment.head_rows > 0, where, "has ", segment.num_heads(),
        " heads of ", segment.head_rows, " ", axis_name(layout.axis), "; both should be positive");
    TORCH_CHECK_VALUE(
        !segment.name.empty() && segment.name.find_first_of(" =") == std::string::npos, where,
        "a segment's name should not be empty or contain spaces or '='");
    const auto* other = streams.try_emplace(segment.stream, &segment).first->second;
    TORCH_CHECK_VALUE(
        other->num_heads() == segment.num_heads(), where, "cannot share the random partition of '",
        other->name, "', which has ", other->num_heads(), " heads instead of ",
        segment.num_heads());
    segment.schedule = checked(std::move(segment.schedule), segment.num_heads(), where);
  }
  check_cover(layout, layout.axis == Axis::kRows ? shape.rows : shape.cols, parameter);
  return layout;
}

Layout parse_layout(std::string_view text) {
  const auto words = split(text, ' ');
  Layout layout;
  TORCH_CHECK_VALUE(
      words[0] == "rows" || words[0] == "columns", "group_muon: layout '", text,
      "' should start with 'rows' or 'columns', the axis along which heads lie");
  if (words[0] == "columns") layout.axis = Axis::kColumns;
  int64_t heads = 0;
  for (size_t i = 1; i < words.size(); ++i) {
    if (words[i] == "transposed") {
      layout.transposed = true;
    } else if (words[i] == "stack") {
      layout.higher_dims = HigherDims::kStack;
    } else if (words[i] == "flatten") {
      layout.higher_dims = HigherDims::kFlatten;
    } else {
      layout.segments.push_back(parse_segment(words[i]));
      heads += layout.segments.back().num_heads();
      check_heads(heads, text);
    }
  }
  return layout;
}

std::string to_string(const Layout& layout) {
  std::string text = axis_name(layout.axis);
  if (layout.transposed) text += " transposed";
  if (layout.higher_dims == HigherDims::kStack) text += " stack";
  if (layout.higher_dims == HigherDims::kFlatten) text += " flatten";
  for (const auto& segment : layout.segments) text += c10::str(" ", to_string(segment));
  return text;
}

}  // namespace group_muon
