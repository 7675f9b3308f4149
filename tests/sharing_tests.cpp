// Which process owns what: every element once, shares of about the same size, pieces that no group crosses.

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

#include "group_muon/sharing.h"
#include "testing.h"

namespace group_muon {
namespace {

SharedWeight muon(const std::string& name, std::vector<int64_t> sizes, const std::string& layout) {
  const auto parsed = checked(parse_layout(layout), sizes, name);
  return {.name = name, .sizes = std::move(sizes), .layout = parsed};
}

SharedWeight adamw(const std::string& name, std::vector<int64_t> sizes) {
  return {.name = name, .sizes = std::move(sizes), .adamw = true};
}

// GPT-2's weights: width 768, or smaller.
std::vector<SharedWeight> gpt2(int64_t layers, int64_t width, const std::string& grouping) {
  std::vector<SharedWeight> weights = {adamw("wte", {50257, width})};
  const int64_t head = width / 12;
  const auto qkv = packed_qkv(
      {.heads = 12, .head_dim = head},
      {parse_schedule(grouping), parse_schedule(grouping), parse_schedule("all")});
  for (int64_t i = 0; i < layers; ++i) {
    const auto name = [&](const char* end) { return c10::str("h.", i, ".", end); };
    weights.push_back(muon(name("c_attn"), {3 * width, width}, to_string(qkv)));
    weights.push_back(muon(name("c_proj"), {width, width}, "rows"));
    weights.push_back(muon(name("c_fc"), {4 * width, width}, "rows"));
    weights.push_back(muon(name("mlp.c_proj"), {width, 4 * width}, "rows"));
    weights.push_back(adamw(name("ln_1"), {width}));
  }
  return weights;
}

// Marks the elements of all pieces of a weight: each must be marked once.
void expect_each_element_once(const std::vector<SharedWeight>& weights, int processes) {
  const auto pieces = share_weights(weights, processes);
  std::vector<at::Tensor> marks;
  for (const auto& weight : weights) marks.push_back(at::zeros(weight.sizes));
  for (const auto& piece : pieces) {
    const auto& weight = weights[piece.weight];
    auto& mark = marks[piece.weight];
    const auto taken = take_piece(mark, weight, piece);
    EXPECT_EQ(taken.numel(), piece.elements);
    EXPECT_EQ(taken.sizes(), c10::IntArrayRef(piece_sizes(weight, piece)));
    EXPECT_TRUE(piece.owner >= 0 && piece.owner < processes);
    put_piece(mark, weight, piece, taken.clone() + 1);
  }
  for (size_t i = 0; i < weights.size(); ++i) {
    EXPECT_TRUE(at::equal(marks[i], at::ones(weights[i].sizes))) << weights[i].name;
  }
}

TEST(SharingTest, EveryElementHasOneOwner) {
  for (const auto* grouping : {"all", "1", "3", "4:interval", "6:random", "2:random:3"}) {
    const std::vector<SharedWeight> weights = {
        muon(
            "qkv", {36, 5},
            c10::str("rows q=12x1@0+1/", grouping, " k=12x1@12+1/", grouping, " v=12x1@24+1/3")),
        muon("out", {7, 24}, c10::str("columns o=12x2@0+2/", grouping)),
        muon("experts", {5, 24, 3}, c10::str("rows q=12x2@0+2/", grouping)),
        muon("one", {9, 4}, "rows"),
        adamw("wte", {101, 3}),
        adamw("gain", {1}),
        adamw("empty", {0, 3})};
    for (const int processes : {1, 2, 3, 4, 7, 40}) expect_each_element_once(weights, processes);
  }
}

TEST(SharingTest, SharesAreBalanced) {
  for (const auto* grouping : {"all", "6:random", "1"}) {
    const auto weights = gpt2(12, 768, grouping);
    for (const int processes : {2, 3, 4, 8}) {
      std::vector<double> work(processes, 0), elements(processes, 0);
      for (const auto& piece : share_weights(weights, processes)) {
        if (!weights[piece.weight].adamw) work[piece.owner] += piece.work;
        elements[piece.owner] += static_cast<double>(piece.elements);
      }
      const auto uneven = [](const std::vector<double>& shares) {
        const double mean =
            std::accumulate(shares.begin(), shares.end(), 0.0) / static_cast<double>(shares.size());
        return *std::max_element(shares.begin(), shares.end()) / mean;
      };
      EXPECT_LT(uneven(work), 1.1) << grouping << ", " << processes << " processes";
      EXPECT_LT(uneven(elements), 1.02) << grouping << ", " << processes << " processes";
    }
  }
}

TEST(SharingTest, ALargeWeightIsCutBetweenItsGroups) {
  const std::vector<SharedWeight> weights = {muon("q", {768, 64}, "rows q=12x64@0+64/3:interval")};
  const auto pieces = share_weights(weights, 4);
  ASSERT_EQ(pieces.size(), 4);
  std::vector<int> owners;
  for (const auto& piece : pieces) {
    ASSERT_EQ(piece.heads.size(), 3);
    EXPECT_EQ(piece.heads[1], piece.heads[0] + 4);  // an interval group
    owners.push_back(piece.owner);
  }
  std::sort(owners.begin(), owners.end());
  EXPECT_EQ(owners, (std::vector<int>{0, 1, 2, 3}));
}

TEST(SharingTest, SegmentsWhoseHeadsDependOnEachOtherAreNotCut) {
  auto weight = muon("qkv", {96, 64}, "rows q=6x8@0+8/1 k=6x8@48+8/2:interval~1");
  EXPECT_EQ(smallest_pieces(weight).size(), 9);
  const auto cut = fingerprints({weight}, share_weights({weight}, 4));
  weight.whole_segments = true;
  EXPECT_EQ(smallest_pieces(weight).size(), 2);
  const auto pieces = share_weights({weight}, 4);
  ASSERT_EQ(pieces.size(), 2);
  for (const auto& piece : pieces) EXPECT_EQ(piece.heads.size(), 6);
  EXPECT_NE(cut, fingerprints({weight}, pieces));
}

TEST(SharingTest, AFingerprintTellsWeightsAndSharesApart) {
  const auto weights = gpt2(2, 24, "3");
  const auto same = fingerprints(weights, share_weights(weights, 2));
  EXPECT_EQ(same, fingerprints(weights, share_weights(weights, 2)));
  const auto random = gpt2(2, 24, "3:random");
  const auto other = fingerprints(random, share_weights(random, 2));
  EXPECT_NE(same[1], other[1]);  // c_attn
  EXPECT_EQ(same[2], other[2]);
}

TEST(SeparableHeadsTest, AreWhatNoGroupingJoins) {
  const auto sets = [](int64_t heads, const char* text) {
    return separable_heads(heads, checked(parse_schedule(text), heads, ""));
  };
  using Sets = std::vector<std::vector<int64_t>>;
  EXPECT_EQ(sets(4, "1"), (Sets{{0}, {1}, {2}, {3}}));
  EXPECT_EQ(sets(4, "1:random"), (Sets{{0}, {1}, {2}, {3}}));
  EXPECT_EQ(sets(4, "2"), (Sets{{0, 1}, {2, 3}}));
  EXPECT_EQ(sets(4, "2:interval"), (Sets{{0, 2}, {1, 3}}));
  EXPECT_EQ(sets(4, "2:random"), (Sets{{0, 1, 2, 3}}));
  EXPECT_EQ(sets(8, "2:random:2"), (Sets{{0, 1, 2, 3}, {4, 5, 6, 7}}));
  EXPECT_EQ(sets(4, "2:3-0-2-1"), (Sets{{0, 3}, {1, 2}}));
  EXPECT_EQ(sets(8, "2,2:interval@5"), (Sets{{0, 1, 4, 5}, {2, 3, 6, 7}}));
  EXPECT_EQ(sets(3, "all"), (Sets{{0, 1, 2}}));
  EXPECT_EQ(sets(4, "1*0.5"), (Sets{{0}, {1}, {2}, {3}}));
  EXPECT_EQ(sets(4, "1~2/5"), (Sets{{0, 1}, {2, 3}}));
  EXPECT_EQ(sets(4, "2~all/5"), (Sets{{0, 1, 2, 3}}));
  EXPECT_EQ(sets(8, "1,2:random:4@0.5lr"), (Sets{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
}

}  // namespace
}  // namespace group_muon
