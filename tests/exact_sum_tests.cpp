#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "train/exact_sum.h"

namespace train {
namespace {

double sum_of(const std::vector<double>& numbers) {
  ExactSum sum;
  for (const double number : numbers) sum.add(number);
  return sum.value();
}

TEST(ExactSum, IsExactForAllSizesOfNumbers) {
  EXPECT_EQ(sum_of({}), 0);
  EXPECT_EQ(sum_of({1, 2, 0.5}), 3.5);
  // In fp64 the small ones would vanish one by one.
  std::vector<double> numbers(1 << 12, std::ldexp(1.0, -60));
  numbers.push_back(1);
  EXPECT_EQ(sum_of(numbers), 1 + std::ldexp(1.0, -48));
  const double least = std::numeric_limits<double>::denorm_min();
  EXPECT_EQ(sum_of({least, least, least}), 3 * least);
  EXPECT_EQ(
      sum_of({std::numeric_limits<double>::min() / 3}), std::numeric_limits<double>::min() / 3);
  const double most = std::numeric_limits<double>::max();
  EXPECT_EQ(sum_of({most / 2, most / 4, least}), most / 2 + most / 4);
  EXPECT_EQ(sum_of({most, most}), std::numeric_limits<double>::infinity());
}

TEST(ExactSum, DoesNotDependOnTheOrderOrOnWhoAddsWhat) {
  std::mt19937_64 random(1);
  std::vector<double> numbers;
  for (int i = 0; i < 2000; ++i) {
    const double mantissa = std::ldexp(static_cast<double>(random() >> 11), -53);
    numbers.push_back(std::ldexp(mantissa, static_cast<int>(random() % 200) - 100));
  }
  const double expected = sum_of(numbers);
  long double rough = 0;
  for (const double number : numbers) rough += number;
  EXPECT_NEAR(expected, static_cast<double>(rough), 1e-15 * expected);
  for (int parts = 1; parts <= 5; ++parts) {
    std::shuffle(numbers.begin(), numbers.end(), random);
    std::vector<ExactSum> sums(parts);
    for (size_t i = 0; i < numbers.size(); ++i) sums[i % parts].add(numbers[i]);
    auto digits = sums[0].digits();
    for (int part = 1; part < parts; ++part) {
      for (size_t i = 0; i < digits.size(); ++i) digits[i] += sums[part].digits()[i];
    }
    ExactSum all;
    all.set_digits(digits);
    EXPECT_EQ(all.value(), expected) << parts;
  }
}

TEST(ExactSum, IsNotANumberIfOneIsNotFinite) {
  EXPECT_TRUE(std::isnan(sum_of({1, std::numeric_limits<double>::infinity()})));
  EXPECT_TRUE(std::isnan(sum_of({NAN, 1})));
}

}  // namespace
}  // namespace train
