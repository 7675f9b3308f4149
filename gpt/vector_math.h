#pragma once
// exp and the normal distribution in a form that compilers vectorize for float. fp64 uses the standard library.

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace gpt {

// eˣ as 2ⁿ·e^r with |r| ≤ ln 2 / 2, for x up to 88, accurate to 2 units in the last place. Returns 0 below -87,
// infinity above 88 and NaN for NaN. x is only compared at the end, because compilers turn an earlier clamp into
// branches.
[[gnu::always_inline]] inline float vector_exp(float x) {
  constexpr float kLog2e = 1.44269504F, kLn2High = 0.693359375F, kLn2Low = -2.12194440e-4F;
  // Adding 1.5·2²³ rounds to an integer and leaves it in the lowest bits.
  constexpr float kRound = 12582912.0F;
  const float shifted = x * kLog2e + kRound;
  const float n = shifted - kRound;
  const float r = x - n * kLn2High - n * kLn2Low;
  // The polynomial of degree 6 with the smallest relative error there, 2e-9.
  float sum = 0.00138367945F;
  sum = sum * r + 0.00837485678F;
  sum = sum * r + 0.0416682288F;
  sum = sum * r + 0.166664198F;
  sum = sum * r + 0.499999911F;
  sum = sum * r + 1.0F;
  sum = sum * r + 1.0F;
  const auto power = std::bit_cast<float>((std::bit_cast<uint32_t>(shifted) + 127) << 23);
  const float value = x < -87.0F ? 0.0F : sum * power;
  return x > 88.0F ? std::numeric_limits<float>::infinity() : value;
}
[[gnu::always_inline]] inline double vector_exp(double x) { return std::exp(x); }

// Φ(x) and the density φ(x) of the standard normal distribution.
template <typename S>
struct Normal {
  S distribution;
  S density;
};

// Uses a rational approximation of erfc·e^(x²), accurate to 1e-7.
[[gnu::always_inline]] inline Normal<float> normal(float x) {
  constexpr float kRootHalf = 0.70710678F, kInverseRoot2Pi = 0.39894228F;
  const float z = std::fabs(x) * kRootHalf;
  const float t = 1.0F / (1.0F + 0.3275911F * z);
  float sum = 1.061405429F;
  sum = sum * t - 1.453152027F;
  sum = sum * t + 1.421413741F;
  sum = sum * t - 0.284496736F;
  sum = sum * t + 0.254829592F;
  const float gauss = vector_exp(-z * z);
  const float tail = 0.5F * sum * t * gauss;  // Φ(-|x|)
  return {x < 0 ? tail : 1.0F - tail, kInverseRoot2Pi * gauss};
}
[[gnu::always_inline]] inline Normal<double> normal(double x) {
  return {0.5 * std::erfc(-x * std::sqrt(0.5)), std::exp(-0.5 * x * x) / std::sqrt(2 * M_PI)};
}

}  // namespace gpt
