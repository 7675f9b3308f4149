// Statistics of paired runs, compared with SciPy 1.16.3 on fixed data and tested under a null hypothesis.

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "study/statistics.h"

namespace study {
namespace {

const std::vector<double> kClear = {-0.031, -0.027, -0.044, -0.012, -0.035, -0.029, -0.018, -0.040};
const std::vector<double> kNothing = {0.004, -0.006, 0.001, 0.009, -0.003, 0.002, -0.008, 0.005};

std::vector<double> many() {
  auto all = kClear;
  all.insert(all.end(), kNothing.begin(), kNothing.end());
  all.insert(all.end(), {0.011, -0.02, 0.003, -0.007, 0.015});
  return all;
}

TEST(StatisticsTest, StudentsDistributionEqualsScipys) {
  EXPECT_NEAR(student_cdf(0.5, 1), 0.6475836176504333, 1e-13);
  EXPECT_NEAR(student_cdf(2, 7), 0.9571903357185121, 1e-13);
  EXPECT_NEAR(student_cdf(-3.1, 3), 0.026647772307168013, 1e-13);
  EXPECT_NEAR(student_cdf(10, 2), 0.9950737714883371, 1e-13);
  EXPECT_EQ(student_cdf(0, 5), 0.5);
  EXPECT_NEAR(student_cdf(1.96, 1000), 0.9748634075221256, 1e-12);
  EXPECT_NEAR(student_cdf(40, 4), 0.9999988329918387, 1e-13);
  EXPECT_NEAR(student_quantile(0.975, 1), 12.706204736432095, 1e-9);
  EXPECT_NEAR(student_quantile(0.975, 7), 2.3646242515927844, 1e-12);
  EXPECT_NEAR(student_quantile(1 - 0.05 / 72, 7), 5.106847797006447, 1e-10);
  EXPECT_NEAR(student_quantile(0.025, 3), -3.1824463052842638, 1e-12);
  EXPECT_NEAR(student_quantile(0.5, 4), 0, 1e-12);
  EXPECT_NEAR(student_quantile(0.999999, 2), 707.1057205157684, 1e-5);
}

TEST(StatisticsTest, PairedDifferencesEqualScipys) {
  const auto clear = paired(kClear, 36);
  EXPECT_EQ(clear.count, 8);
  EXPECT_NEAR(clear.mean, -0.0295, 1e-15);
  EXPECT_NEAR(clear.low, -0.03842626080057576, 1e-13);
  EXPECT_NEAR(clear.high, -0.020573739199424235, 1e-13);
  EXPECT_NEAR(clear.simultaneous_low, -0.04877792767676292, 1e-12);
  EXPECT_NEAR(clear.simultaneous_high, -0.010222072323237078, 1e-12);
  EXPECT_EQ(clear.p, 0.0078125);
  const auto nothing = paired(kNothing, 1);
  EXPECT_NEAR(nothing.low, -0.004333659507604779, 1e-13);
  EXPECT_NEAR(nothing.high, 0.005333659507604778, 1e-13);
  EXPECT_EQ(nothing.simultaneous_high, nothing.high);
  EXPECT_EQ(nothing.p, 0.8515625);
  const auto two = paired({-0.031, -0.027}, 36);
  EXPECT_NEAR(two.low, -0.05441240947286419, 1e-12);
  EXPECT_NEAR(two.simultaneous_high, 0.8877310177678142, 1e-9);
  EXPECT_EQ(two.p, 0.5);
  const auto large = paired(many(), 36);
  EXPECT_NEAR(large.high, -0.002885701508913265, 1e-13);
  EXPECT_NEAR(large.p, 0.010698, 5e-4) << "random draws, as in SciPy";
  EXPECT_NEAR(summarize(many()).deviation, 0.017721388744892964, 1e-14);
}

TEST(StatisticsTest, TooFewSayNothing) {
  EXPECT_TRUE(std::isnan(summarize({}).mean));
  EXPECT_TRUE(std::isnan(summarize({1}).deviation));
  const auto one = paired({-0.5}, 3);
  EXPECT_EQ(one.mean, -0.5);
  EXPECT_TRUE(std::isnan(one.high));
  EXPECT_TRUE(std::isnan(one.p));
  EXPECT_TRUE(std::isnan(sign_flip_p({})));
  EXPECT_EQ(sign_flip_p({0, 0, 0}), 1);
  EXPECT_EQ(sign_flip_p({-0.1, -0.1, -0.1}), 0.25) << "sums that differ by rounding count as equal";
}

TEST(StatisticsTest, HolmsCorrection) {
  const auto corrected = holm({0.01, 0.04, 0.03, 0.005, 0.5, 0.2});
  const std::vector<double> expected = {0.05, 0.12, 0.12, 0.03, 0.5, 0.4};
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(corrected[i], expected[i], 1e-15);
  EXPECT_TRUE(std::isnan(holm({0.01, std::nan("")})[1]));
  EXPECT_EQ(holm({0.01, std::nan("")})[0], 0.01) << "a missing value is not a comparison";
}

TEST(StatisticsTest, UnderANullIntervalsMissAsOftenAsTheySay) {
  // 36 settings share a baseline, have 8 seeds and differ by noise only. At most 5% of the studies may mark a
  // setting, and single intervals should miss 0 in 5% of all cases.
  constexpr int kStudies = 1500, kSettings = 36, kSeeds = 8;
  std::mt19937_64 generator(5);
  std::normal_distribution<double> noise(0, 0.004);
  int studies_with_a_mark = 0, misses = 0;
  for (int study = 0; study < kStudies; ++study) {
    std::vector<double> baseline(kSeeds);
    for (double& value : baseline) value = noise(generator);
    bool marked = false;
    for (int setting = 0; setting < kSettings; ++setting) {
      std::vector<double> differences(kSeeds);
      for (int seed = 0; seed < kSeeds; ++seed) {
        differences[seed] = noise(generator) - baseline[seed];
      }
      const auto result = paired(differences, kSettings);
      marked = marked || result.simultaneous_high < 0 || result.simultaneous_low > 0;
      misses += result.low > 0 || result.high < 0 ? 1 : 0;
    }
    studies_with_a_mark += marked ? 1 : 0;
  }
  EXPECT_LE(studies_with_a_mark, 0.05 * kStudies);
  EXPECT_NEAR(misses, 0.05 * kStudies * kSettings, 0.01 * kStudies * kSettings);
}

}  // namespace
}  // namespace study
