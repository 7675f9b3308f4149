#include <numeric>

#include "group_muon/layout.h"
#include "testing.h"

namespace group_muon {
namespace {

using Rows = std::vector<int64_t>;

const Segment& named(const Layout& layout, const std::string& name) {
  for (const auto& segment : layout.segments) {
    if (segment.name == name) return segment;
  }
  throw std::runtime_error("no segment " + name);
}

TEST(Layout, PackedQkvHasAllQueriesThenKeysThenValues) {
  const auto layout = packed_qkv({.heads = 12, .head_dim = 64});
  EXPECT_EQ(named(layout, "q").head_starts[11], 704);
  EXPECT_EQ(named(layout, "k").head_starts[0], 768);
  EXPECT_EQ(named(layout, "v").head_starts[0], 1536);
  EXPECT_NO_THROW(checked(layout, {2304, 768}, "w"));
}

TEST(Layout, GroupedAndMultiQueryHaveFewerKeyAndValueHeads) {
  const auto gqa = checked(packed_qkv({.heads = 8, .head_dim = 4, .kv_heads = 2}), {48, 16}, "w");
  EXPECT_EQ(named(gqa, "k").head_starts, (Rows{32, 36}));
  EXPECT_EQ(named(gqa, "v").head_starts, (Rows{40, 44}));
  const auto mqa = checked(packed_qkv({.heads = 8, .head_dim = 4, .kv_heads = 1}), {40, 16}, "w");
  EXPECT_EQ(named(mqa, "v").head_starts, (Rows{36}));
}

TEST(Layout, ValuesMayHaveAnotherHeadDimension) {
  const auto layout =
      checked(packed_qkv({.heads = 2, .head_dim = 4, .value_dim = 6}), {28, 8}, "w");
  EXPECT_EQ(named(layout, "v").head_starts, (Rows{16, 22}));
  EXPECT_EQ(named(layout, "v").head_rows, 6);
}

TEST(Layout, InterleavedAlternatesHeadByHead) {
  const auto layout = checked(interleaved_qkv({.heads = 3, .head_dim = 2}), {18, 8}, "w");
  EXPECT_EQ(named(layout, "q").head_starts, (Rows{0, 6, 12}));
  EXPECT_EQ(named(layout, "k").head_starts, (Rows{2, 8, 14}));
  EXPECT_EQ(named(layout, "v").head_starts, (Rows{4, 10, 16}));
}

TEST(Layout, InterleavedPerKvGroupHasItsQueriesFirst) {
  const auto layout = checked(
      interleaved_qkv({.heads = 4, .head_dim = 2, .kv_heads = 2, .value_dim = 3}), {18, 8}, "w");
  EXPECT_EQ(named(layout, "q").head_starts, (Rows{0, 2, 9, 11}));
  EXPECT_EQ(named(layout, "k").head_starts, (Rows{4, 13}));
  EXPECT_EQ(named(layout, "v").head_starts, (Rows{6, 15}));
}

TEST(Layout, MlaHeadsHaveTwoParts) {
  const auto query = checked(mla_query(3, 4, 2), {18, 8}, "w");
  EXPECT_EQ(named(query, "nope").head_starts, (Rows{0, 6, 12}));
  EXPECT_EQ(named(query, "rope").head_starts, (Rows{4, 10, 16}));
  const auto key_value = checked(mla_key_value(3, 4, 5), {27, 8}, "w");
  EXPECT_EQ(named(key_value, "k").head_starts, (Rows{0, 9, 18}));
  EXPECT_EQ(named(key_value, "v").head_starts, (Rows{4, 13, 22}));
}

TEST(Layout, OutputProjectionLiesAlongColumnsAndTransposingTurnsIt) {
  const auto output = output_projection(4, 2);
  EXPECT_EQ(output.axis, Axis::kColumns);
  EXPECT_NO_THROW(checked(output, {16, 8}, "w"));
  const auto turned = transposed(output);
  EXPECT_EQ(turned.axis, Axis::kRows);
  EXPECT_TRUE(turned.transposed);
  EXPECT_EQ(transposed(turned), output);
}

TEST(Layout, WeightsOfMoreThanTwoDimensionsAreStackedOrFlattened) {
  const auto shape = [](c10::IntArrayRef sizes, const Layout& layout) {
    const auto s = matrix_shape(sizes, layout, "w");
    return std::vector<int64_t>{s.count, s.rows, s.cols};
  };
  EXPECT_EQ(shape({6, 4}, plain()), (Rows{1, 6, 4}));
  EXPECT_EQ(shape({8, 6, 4}, plain()), (Rows{8, 6, 4}));
  EXPECT_EQ(shape({8, 6, 3, 3}, plain()), (Rows{1, 8, 54}));
  EXPECT_EQ(shape({8, 6, 3}, convolution()), (Rows{1, 8, 18}));
  EXPECT_EQ(shape({2, 8, 6, 4}, stacked(plain())), (Rows{16, 6, 4}));
}

TEST(Layout, SegmentsDrawTheirOwnPartitionUnlessShared) {
  const AttentionShape shape{.heads = 4, .head_dim = 2};
  EXPECT_NE(packed_qkv(shape).segments[0].stream, packed_qkv(shape).segments[1].stream);
  const auto shared = packed_qkv(shape, {.share_qk = true});
  EXPECT_EQ(shared.segments[0].stream, shared.segments[1].stream);
  EXPECT_NE(shared.segments[1].stream, shared.segments[2].stream);
}

TEST(Layout, CheckingSpellsOutAll) {
  const auto layout = checked(separate(6, 2), {12, 4}, "w");
  EXPECT_EQ(layout.segments[0].schedule[0].group_size, 6);
}

TEST(Layout, TextAndBack) {
  const std::vector<Layout> layouts = {
      plain(),
      convolution(),
      stacked(plain()),
      packed_qkv(
          {.heads = 12, .head_dim = 64},
          {.q = parse_schedule("6:random"), .k = parse_schedule("1,6:random@20")}),
      interleaved_qkv({.heads = 4, .head_dim = 2, .kv_heads = 2}, {.share_qk = true}),
      mla_query(4, 8, 2, parse_schedule("2:3-1-0-2")),
      packed_qkv(
          {.heads = 12, .head_dim = 64}, {.q = parse_schedule("6:random*0.5~all*1.5/5"),
                                          .k = parse_schedule("6:random~2/5"),
                                          .v = parse_schedule("1*1e-05,6~3/2@0.5lr")}),
      transposed(output_projection(4, 2, parse_schedule("2:interval")))};
  for (const auto& layout : layouts) EXPECT_EQ(parse_layout(to_string(layout)), layout);
  EXPECT_EQ(
      to_string(packed_qkv({.heads = 12, .head_dim = 64}, {.q = parse_schedule("6:random")})),
      "rows q=12x64@0+64/6:random k=12x64@768+64/all~1 v=12x64@1536+64/all~2");
}

TEST(Layout, AStreamAndAPeriodicGroupingAreToldApart) {
  const auto segment = [](const std::string& grouping) {
    return parse_layout("rows q=12x64@0+64/" + grouping).segments[0];
  };
  EXPECT_EQ(to_string(segment("6:random~all/5").schedule), "6:random~all/5");
  EXPECT_EQ(segment("6:random~all/5").stream, 0);
  EXPECT_EQ(to_string(segment("6:random~2/5~1").schedule), "6:random~2/5");
  EXPECT_EQ(segment("6:random~2/5~1").stream, 1);
  EXPECT_EQ(to_string(segment("6:random~2").schedule), "6:random");
  EXPECT_EQ(segment("6:random~2").stream, 2);
  EXPECT_EQ(to_string(segment("6:random~2/5,1@9~3").schedule), "6:random~2/5,1@9");
  EXPECT_EQ(segment("1,6~2/5@0.5lr~3").stream, 3);
  EXPECT_ERROR_SAYS(segment("6:random~x"), "'x' in");
  EXPECT_ERROR_SAYS(segment("6:random~all~1"), "should say at which steps, as in ~all/5");
}

TEST(Layout, GroupingCanBeSetBySegment) {
  const auto layout = packed_qkv({.heads = 4, .head_dim = 2});
  const auto changed = with_grouping(layout, parse_schedule("2:random"), "k");
  EXPECT_EQ(to_string(named(changed, "k").schedule), "2:random");
  EXPECT_EQ(named(changed, "q"), named(layout, "q"));
  for (const auto& segment : with_grouping(layout, parse_schedule("1")).segments) {
    EXPECT_EQ(segment.schedule[0].group_size, 1);
  }
}

TEST(LayoutErrors, NameTheParameterTheValueAndWhatWouldBeValid) {
  const auto packed = packed_qkv({.heads = 12, .head_dim = 64});
  EXPECT_ERROR_SAYS(
      checked(with_grouping(packed, parse_schedule("5"), "k"), {2304, 768}, "h.0.attn.weight"),
      "parameter 'h.0.attn.weight', segment 'k': group size 5 does not divide 12 heads; use one of "
      "1, 2, 3, 4, 6, 12");
  EXPECT_ERROR_SAYS(
      checked(packed, {2300, 768}, "h.0.attn.weight"),
      "parameter 'h.0.attn.weight' has 2300 rows, but its layout declares 2304 (12×64 q + 12×64 k "
      "+ 12×64 v)");
  EXPECT_ERROR_SAYS(checked(output_projection(12, 64), {768, 700}, "o"), "'o' has 700 columns");
  EXPECT_ERROR_SAYS(
      checked(packed, {2304}, "bias"), "parameter 'bias' of shape [2304] has 1 dimension(s)");
  EXPECT_ERROR_SAYS(checked(plain(), {7}, "gain"), "use AdamW for biases, gains and other vectors");
  EXPECT_ERROR_SAYS(
      packed_qkv({.heads = 12, .head_dim = 64, .kv_heads = 5}),
      "5 KV heads do not divide the 12 query heads");
  EXPECT_ERROR_SAYS(packed_qkv({.heads = 0, .head_dim = 64}), "should be positive");
  EXPECT_ERROR_SAYS(separate(-1, 64), "should be positive");
  EXPECT_ERROR_SAYS(
      with_grouping(packed, parse_schedule("2"), "x"),
      "no segment 'x' to group; this layout has q, k, v");
  EXPECT_ERROR_SAYS(with_grouping(plain(), parse_schedule("2")), "none (the matrix is one block)");
  EXPECT_ERROR_SAYS(parse_layout("diagonal"), "should start with 'rows' or 'columns'");
  EXPECT_ERROR_SAYS(parse_layout("rows q=12"), "should look like q=12x64@0+64/6:random");
}

TEST(LayoutErrors, ATextCannotAskForMoreThanAnyModelHas) {
  EXPECT_ERROR_SAYS(parse_layout("rows q=0x1@0+1/1"), "has a segment without heads");
  EXPECT_ERROR_SAYS(
      parse_layout("rows q=9223372036854775807x1@0+1/1"),
      "has 9223372036854775807 heads; at most 1048576 are allowed");
  EXPECT_ERROR_SAYS(
      parse_layout("rows q=1000000x1@0+1/1 k=1000000x1@0+1/1"), "has 2000000 heads; at most");
  EXPECT_ERROR_SAYS(
      parse_layout("rows q=2x4294967296@0+1/1"), "4294967296 in 'q=2x4294967296@0+1/1' should be");
  for (const char* places : {"0,4294967296", "4294967296+1", "0+4294967296"}) {
    EXPECT_ERROR_SAYS(
        parse_layout(c10::str("rows q=2x1@", places, "/1")), "should be at most 2147483647");
  }
}

TEST(LayoutErrors, RowsCoveredTwiceOrNeverAreRefused) {
  const auto with_starts = [](Rows starts) {
    return Layout{.segments = {{.name = "q", .head_starts = std::move(starts), .head_rows = 2}}};
  };
  EXPECT_NO_THROW(checked(with_starts({4, 0, 2}), {6, 4}, "w"));
  EXPECT_ERROR_SAYS(checked(with_starts({0, 1, 4}), {6, 4}, "w"), "overlaps rows 1 … 1");
  EXPECT_ERROR_SAYS(checked(with_starts({0, 3, 4}), {6, 4}, "w"), "leaves out rows 2 … 2");
  EXPECT_ERROR_SAYS(checked(with_starts({0, 2, 6}), {6, 4}, "w"), "leaves out rows 4 … 5");
}

TEST(LayoutErrors, UnequalHeadCountsCannotShareAPartition) {
  const auto layout = packed_qkv({.heads = 4, .head_dim = 2, .kv_heads = 2}, {.share_qk = true});
  EXPECT_ERROR_SAYS(
      checked(layout, {16, 4}, "w"),
      "segment 'k': cannot share the random partition of 'q', which has 4 heads instead of 2");
}

}  // namespace
}  // namespace group_muon
