#include <cmath>

#include "group_muon/scale.h"
#include "testing.h"

namespace group_muon {
namespace {

TEST(Scale, RulesAreTheirFormulas) {
  const OutIn tall{3072, 768}, wide{768, 3072};
  EXPECT_DOUBLE_EQ(scale_factor(ScaleRule::kNaive, tall), 1);
  EXPECT_DOUBLE_EQ(scale_factor(ScaleRule::kKellerJordan, tall), 2);
  EXPECT_DOUBLE_EQ(scale_factor(ScaleRule::kKellerJordan, wide), 1);
  EXPECT_DOUBLE_EQ(scale_factor(ScaleRule::kMup, tall), 2);
  EXPECT_DOUBLE_EQ(scale_factor(ScaleRule::kMup, wide), 0.5);
  EXPECT_DOUBLE_EQ(scale_factor(ScaleRule::kMoonlight, wide), 0.2 * std::sqrt(3072));
  EXPECT_DOUBLE_EQ(scale_factor(ScaleRule::kSqrtMax, wide), std::sqrt(3072));
}

TEST(Scale, OneRuleForBaseAndTransferIsThatRuleOnTheBlock) {
  const OutIn block{384, 768}, segment{768, 768}, matrix{2304, 768};
  for (const auto rule :
       {ScaleRule::kNaive, ScaleRule::kKellerJordan, ScaleRule::kMup, ScaleRule::kMoonlight,
        ScaleRule::kSqrtMax}) {
    for (const auto reference : {ScaleReference::kSegment, ScaleReference::kMatrix}) {
      EXPECT_NEAR(
          update_scale({rule, rule, reference}, block, segment, matrix), scale_factor(rule, block),
          1e-12);
    }
  }
}

TEST(Scale, WithThreeWayReferenceOnlyMupDependsOnTheGroupSize) {
  for (const int64_t g : {1, 2, 3, 4, 6, 12}) {
    const OutIn block{64 * g, 768}, segment{768, 768}, matrix{2304, 768};
    const auto transfer = [&](ScaleRule rule) {
      return update_scale(
          {ScaleRule::kNaive, rule, ScaleReference::kSegment}, block, segment, matrix);
    };
    EXPECT_NEAR(transfer(ScaleRule::kMup), std::sqrt(g / 12.0), 1e-12);
    for (const auto rule :
         {ScaleRule::kNaive, ScaleRule::kKellerJordan, ScaleRule::kMoonlight,
          ScaleRule::kSqrtMax}) {
      EXPECT_DOUBLE_EQ(transfer(rule), 1);
    }
  }
}

TEST(Scale, ThePackedReferenceTransfersFromTheWholeWeight) {
  const OutIn block{64, 768}, segment{768, 768}, matrix{2304, 768};
  EXPECT_NEAR(
      update_scale(
          {ScaleRule::kSqrtMax, ScaleRule::kNaive, ScaleReference::kMatrix}, block, segment,
          matrix),
      std::sqrt(2304), 1e-12);
  EXPECT_NEAR(
      update_scale(
          {ScaleRule::kSqrtMax, ScaleRule::kMup, ScaleReference::kMatrix}, block, segment, matrix),
      std::sqrt(2304) * std::sqrt(64.0 / 2304), 1e-12);
}

TEST(Scale, NamesAreReadAndUnknownOnesRefused) {
  EXPECT_EQ(parse_scale_rule("naive"), ScaleRule::kNaive);
  EXPECT_EQ(parse_scale_rule("keller_jordan"), ScaleRule::kKellerJordan);
  EXPECT_EQ(parse_scale_rule("mup"), ScaleRule::kMup);
  EXPECT_EQ(parse_scale_rule("moonlight"), ScaleRule::kMoonlight);
  EXPECT_EQ(parse_scale_rule("sqrt_max"), ScaleRule::kSqrtMax);
  EXPECT_EQ(parse_scale_reference("matrix"), ScaleReference::kMatrix);
  EXPECT_ERROR_SAYS(
      parse_scale_rule("sqrt"),
      "unknown scale 'sqrt': use naive, keller_jordan, mup, moonlight or sqrt_max");
  EXPECT_ERROR_SAYS(
      parse_scale_reference("packed"), "unknown reference 'packed': use segment or matrix");
}

}  // namespace
}  // namespace group_muon
