#include <algorithm>
#include <cmath>
#include <set>
#include <string>

#include "group_muon/grouping.h"
#include "testing.h"

namespace group_muon {
namespace {

using Groups = std::vector<std::vector<int64_t>>;

Groups groups_of(int64_t heads, const std::string& text, const RandomKey& key = {}) {
  const auto schedule = checked(parse_schedule(text), heads, "test: ");
  const auto& grouping = grouping_at(schedule, key.step, 1);
  const auto order = head_order(heads, grouping, key);
  Groups groups;
  for (auto it = order.begin(); it != order.end(); it += grouping.group_size) {
    groups.emplace_back(it, it + grouping.group_size);
  }
  return groups;
}

// The 99.9% quantile of the chi-square distribution (Wilson–Hilferty approximation).
double chi_square_limit(double degrees) {
  const double k = 2.0 / (9.0 * degrees);
  return degrees * std::pow(1.0 - k + 3.09 * std::sqrt(k), 3);
}

TEST(Grouping, AdjacentIsThePapersExample) {
  EXPECT_EQ(groups_of(12, "3:adjacent"), (Groups{{0, 1, 2}, {3, 4, 5}, {6, 7, 8}, {9, 10, 11}}));
}

TEST(Grouping, IntervalIsThePapersExample) {
  EXPECT_EQ(groups_of(12, "3:interval"), (Groups{{0, 4, 8}, {1, 5, 9}, {2, 6, 10}, {3, 7, 11}}));
  EXPECT_EQ(groups_of(12, "6:interval"), (Groups{{0, 2, 4, 6, 8, 10}, {1, 3, 5, 7, 9, 11}}));
}

TEST(Grouping, ThePapersPermutationIsCutIntoRuns) {
  EXPECT_EQ(
      groups_of(12, "3:7-2-10-0-5-9-1-4-11-3-6-8"),
      (Groups{{7, 2, 10}, {0, 5, 9}, {1, 4, 11}, {3, 6, 8}}));
}

TEST(Grouping, EveryRuleIsAPartitionForAnyNumberOfHeads) {
  for (int64_t heads = 1; heads <= 40; ++heads) {
    for (int64_t g = 1; g <= heads; ++g) {
      if (heads % g != 0) continue;
      for (const auto rule :
           {GroupingRule::kAdjacent, GroupingRule::kInterval, GroupingRule::kRandom}) {
        auto order = head_order(heads, {.group_size = g, .rule = rule}, {.seed = 3});
        ASSERT_EQ(static_cast<int64_t>(order.size()), heads);
        std::sort(order.begin(), order.end());
        for (int64_t head = 0; head < heads; ++head) ASSERT_EQ(order[head], head);
      }
    }
  }
}

TEST(RandomGrouping, EveryStepDrawsAnotherPartition) {
  std::set<std::vector<int64_t>> seen;
  for (int64_t step = 0; step < 1000; ++step) seen.insert(random_permutation(12, {.step = step}));
  EXPECT_EQ(seen.size(), 1000U);  // out of 479,001,600
}

TEST(RandomGrouping, TheSameStepDrawsTheSameAfterARestart) {
  // Draws carry no state, so drawing step 700 alone is a restart at step 700.
  std::vector<std::vector<int64_t>> run;
  for (int64_t step = 0; step < 800; ++step) {
    run.push_back(random_permutation(12, {5, step, parameter_key("h.0.attn"), 1}));
  }
  EXPECT_EQ(random_permutation(12, {5, 700, parameter_key("h.0.attn"), 1}), run[700]);
}

TEST(RandomGrouping, ValuesAreFixedForAllTime) {
  // Changing these values would change what a seed means for checkpoints and published results.
  EXPECT_EQ(parameter_key("a"), 0xaf63dc4c8601ec8cULL);  // FNV-1a's published value
  EXPECT_EQ(
      random_permutation(12, {.parameter = parameter_key("0")}),
      (std::vector<int64_t>{10, 6, 5, 2, 0, 11, 3, 4, 1, 8, 9, 7}));
}

TEST(RandomGrouping, SeedStepParameterAndSegmentAllMatter) {
  const RandomKey key{1, 2, parameter_key("a"), 0};
  std::set<std::vector<int64_t>> draws = {
      random_permutation(12, key), random_permutation(12, {2, 2, key.parameter, 0}),
      random_permutation(12, {1, 3, key.parameter, 0}),
      random_permutation(12, {1, 2, parameter_key("b"), 0}),
      random_permutation(12, {1, 2, key.parameter, 1})};
  EXPECT_EQ(draws.size(), 5U);
}

TEST(RandomGrouping, EveryHeadIsEquallyLikelyInEveryPlace) {
  constexpr int64_t kHeads = 12, kDraws = 60000;
  std::vector<std::vector<double>> count(kHeads, std::vector<double>(kHeads));
  for (int64_t step = 0; step < kDraws; ++step) {
    const auto order = random_permutation(kHeads, {.seed = 11, .step = step});
    for (int64_t place = 0; place < kHeads; ++place) ++count[order[place]][place];
  }
  const double expected = static_cast<double>(kDraws) / kHeads;
  double chi_square = 0;
  for (const auto& row : count) {
    for (const double n : row) chi_square += (n - expected) * (n - expected) / expected;
  }
  EXPECT_LT(chi_square, chi_square_limit((kHeads - 1) * (kHeads - 1)));
  EXPECT_GT(chi_square, 70);  // not suspiciously even either (mean 121, deviation 16)
}

TEST(RandomGrouping, APairMeetsWithTheRightProbability) {
  constexpr int64_t kHeads = 12, kDraws = 60000;
  for (const int64_t g : {2, 3, 4, 6}) {
    std::vector<double> met(kHeads * kHeads);
    for (int64_t step = 0; step < kDraws; ++step) {
      const auto order = random_permutation(kHeads, {.seed = 17, .step = step});
      for (int64_t i = 0; i < kHeads; ++i) {
        for (int64_t j = 0; j < kHeads; ++j) {
          if (order[i] < order[j] && i / g == j / g) ++met[order[i] * kHeads + order[j]];
        }
      }
    }
    const double p = static_cast<double>(g - 1) / (kHeads - 1);
    const double expected = kDraws * p;
    double chi_square = 0;
    for (int64_t i = 0; i < kHeads; ++i) {
      for (int64_t j = i + 1; j < kHeads; ++j) {
        const double difference = met[i * kHeads + j] - expected;
        chi_square += difference * difference / (expected * (1 - p));
        EXPECT_NEAR(met[i * kHeads + j] / kDraws, p, 5 * std::sqrt(p * (1 - p) / kDraws));
      }
    }
    EXPECT_LT(chi_square, chi_square_limit(66)) << "g = " << g;
  }
}

TEST(GroupingSchedule, HoldsFromItsStepOn) {
  const auto schedule = parse_schedule("1@0,6:random@2000,all@5000");
  EXPECT_EQ(grouping_at(schedule, 0, 1).group_size, 1);
  EXPECT_EQ(grouping_at(schedule, 1999, 1).group_size, 1);
  EXPECT_EQ(grouping_at(schedule, 2000, 1).group_size, 6);
  EXPECT_EQ(grouping_at(schedule, 2000, 1).rule, GroupingRule::kRandom);
  EXPECT_EQ(grouping_at(schedule, 1000000, 1).group_size, 0);
}

// The text of what is used at a step and a learning rate.
std::string used_at(const std::string& text, int64_t step, double lr_fraction) {
  auto used = grouping_at(checked(parse_schedule(text), 12, "test: "), step, lr_fraction);
  used.from_step = 0;
  used.from_lr = 0;
  used.every = 1;
  return to_string({used});
}

TEST(GroupingSchedule, APeriodicGroupingReplacesTheOneBeforeItAtMultiplesOfItsPeriod) {
  for (int64_t step = 0; step < 30; ++step) {
    EXPECT_EQ(used_at("6:random~all*1.5/5", step, 1), step % 5 == 0 ? "12*1.5" : "6:random");
    const char* later = step < 7 ? "1" : step % 4 == 0 ? "3:interval" : "2";
    EXPECT_EQ(used_at("1,2~3:interval/4@7", step, 1), later) << step;
    const char* earlier = step >= 8 ? "6" : step % 3 == 0 ? "4" : "2";
    EXPECT_EQ(used_at("2~4/3,6@8", step, 1), earlier) << step;
  }
}

TEST(GroupingSchedule, MayFollowTheLearningRateUpAndDown) {
  for (const int64_t step : {0, 1, 1000}) {
    EXPECT_EQ(used_at("1,6:random@0.5lr", step, 0), "1");
    EXPECT_EQ(used_at("1,6:random@0.5lr", step, 0.499999), "1");
    EXPECT_EQ(used_at("1,6:random@0.5lr", step, 0.5), "6:random");
    EXPECT_EQ(used_at("1,6:random@0.5lr", step, 3), "6:random");
    EXPECT_EQ(used_at("1,2@0.25lr,6@0.5lr", step, 0.3), "2");
    EXPECT_EQ(used_at("1,2@0.25lr,6@0.5lr", step, std::nan("")), "1");
  }
  EXPECT_EQ(used_at("1,6~all/5@0.5lr", 10, 0.6), "12");
  EXPECT_EQ(used_at("1,6~all/5@0.5lr", 11, 0.6), "6");
  EXPECT_EQ(used_at("1,6~all/5@0.5lr", 10, 0.4), "1");
}

TEST(GroupingSchedule, AFactorMultipliesAllEntries) {
  EXPECT_EQ(
      to_string(with_lr_factor(parse_schedule("1*2,6~all*1.5/5@9"), 0.5)), "1,6*0.5~all*0.75/5@9");
}

TEST(GroupingSchedule, TextAndBack) {
  for (const auto* text :
       {"all", "6:random", "3:interval", "2", "3:2-0-1", "1,6:random@2000,all@5000", "all*0.5",
        "6:random*0.5", "6:random:2*1e-05", "3:2-0-1*1e+20", "6:random~all/5", "6*0~all*1.5/5",
        "1,6:random:2~3:2-0-1/7@0.5lr", "1*0.5,6:random~all*3/5@2000,all@5000",
        "1,2@0.1lr,3@0.30000000000000004lr"}) {
    EXPECT_EQ(to_string(parse_schedule(text)), text);
  }
  EXPECT_EQ(to_string(parse_schedule("1:adjacent@0,6:random@20")), "1,6:random@20");
  EXPECT_EQ(to_string(parse_schedule("1*1@0lr, 6*0.50 ~ all*1/5 @ .5lr")), "1,6*0.5~all/5@0.5lr");
}

TEST(GroupingErrors, NameTheValueAndWhatWouldBeValid) {
  EXPECT_ERROR_SAYS(
      groups_of(12, "5"), "group size 5 does not divide 12 heads; use one of 1, 2, 3, 4, 6, 12");
  EXPECT_ERROR_SAYS(
      groups_of(12, "6:randon"),
      "unknown grouping rule 'randon' in '6:randon': use adjacent, interval, random");
  EXPECT_ERROR_SAYS(groups_of(12, "0"), "group size 0");
  EXPECT_ERROR_SAYS(groups_of(12, "six"), "'six' in 'six' should be a whole number");
  EXPECT_ERROR_SAYS(groups_of(12, "-3"), "'-3' in '-3' should be a whole number");
  EXPECT_ERROR_SAYS(groups_of(12, ""), "should be a whole number");
  EXPECT_ERROR_SAYS(groups_of(4, "2:0-1-2-2"), "should list each of the heads 0 … 3 exactly once");
  EXPECT_ERROR_SAYS(groups_of(12, "6@10"), "should start at step 0, not 10");
  EXPECT_ERROR_SAYS(groups_of(12, "6,3@10,2@10"), "should increase, but 10 follows 10");
  EXPECT_ERROR_SAYS(checked(GroupingSchedule{}, 12, "here: "), "here: no grouping is given");
  EXPECT_ERROR_SAYS(groups_of(12, "6*"), "'' in '6*' should be a number, 0 or more");
  for (const char* factor : {"-1", "nan", "inf", "fast", "1e999", "0.5x"}) {
    EXPECT_ERROR_SAYS(
        groups_of(12, c10::str("6*", factor)), c10::str("'", factor, "' in '6*", factor));
  }
  EXPECT_ERROR_SAYS(
      groups_of(12, "6*1e39"), "factor on the learning rate should be from 0 to 1e+38, not 1e+39");
  EXPECT_ERROR_SAYS(
      groups_of(12, "6~all"), "'~all' in '6~all' should say at which steps, as in ~all/5");
  EXPECT_ERROR_SAYS(groups_of(12, "6~all/1"), "'/1' in '6~all/1' should be a period of 2 steps");
  EXPECT_ERROR_SAYS(groups_of(12, "6~all/x"), "'x' in '6~all/x' should be a whole number");
  EXPECT_ERROR_SAYS(groups_of(12, "6~2/3~all/5"), "'3~all/5' in '6~2/3~all/5'");
  EXPECT_ERROR_SAYS(groups_of(12, "6~5/2"), "group size 5 does not divide 12 heads");
  EXPECT_ERROR_SAYS(groups_of(12, "1@0.5lr"), "should start at 0lr, not 0.5lr");
  EXPECT_ERROR_SAYS(
      groups_of(12, "1,6@0.5lr,2@0.25lr"),
      "the learning rates of a schedule should increase, but 0.25lr follows 0.5lr");
  EXPECT_ERROR_SAYS(groups_of(12, "1,6@1.5lr"), "full learning rate, from 0 to 1, not 1.5");
  EXPECT_ERROR_SAYS(groups_of(12, "1,6@lr"), "'' in '1,6@lr' should be a number, 0 or more");
  EXPECT_ERROR_SAYS(
      groups_of(12, "1,6@0.5lr,2@2000"),
      "should go by step or by learning rate, not by both: 2000 and 0.5lr");
  // Texts cannot say these.
  const auto refused = [](const GroupingSchedule& schedule) { checked(schedule, 12, "here: "); };
  EXPECT_ERROR_SAYS(refused({{.every = 5}}), "should follow the one that it replaces at every 5");
  EXPECT_ERROR_SAYS(
      refused({{}, {.group_size = 1, .from_step = 3, .every = 5}}), "and start with it");
  EXPECT_ERROR_SAYS(refused({{.every = 0}}), "period of a grouping should be 1 or more, not 0");
  EXPECT_ERROR_SAYS(refused({{.lr_factor = std::nan("")}}), "factor on the learning rate");
  EXPECT_ERROR_SAYS(refused({{}, {.from_lr = std::nan("")}}), "from 0 to 1, not nan");
}

}  // namespace
}  // namespace group_muon
