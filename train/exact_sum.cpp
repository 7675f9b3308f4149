#include "train/exact_sum.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace train {
namespace {

constexpr int kBits = 32;              // of a digit
constexpr int kLeastExponent = -1074;  // of the smallest number above 0
constexpr int kMantissa = 53;
constexpr uint64_t kLow = 0xffffffff;

}  // namespace

void ExactSum::add(double number) {
  if (!std::isfinite(number)) {
    ++digits_[kDigits];
    return;
  }
  if (number == 0) return;
  int exponent = 0;
  const double fraction = std::frexp(number, &exponent);
  // A number below the normal ones has fewer bits, so shift it less.
  int least = exponent - kMantissa;
  int bits = kMantissa;
  if (least < kLeastExponent) {
    bits -= kLeastExponent - least;
    least = kLeastExponent;
  }
  const auto mantissa = static_cast<uint64_t>(std::ldexp(fraction, bits));
  const int position = least - kLeastExponent;
  const int first = position / kBits, shift = position % kBits;
  const uint64_t low = (mantissa & kLow) << shift, high = (mantissa >> kBits) << shift;
  digits_[first] += static_cast<int64_t>(low & kLow);
  // A digit that does not exist would get 0.
  if (const uint64_t next = (low >> kBits) + (high & kLow); next != 0) {
    digits_[first + 1] += static_cast<int64_t>(next);
  }
  if (const uint64_t next = high >> kBits; next != 0) {
    digits_[first + 2] += static_cast<int64_t>(next);
  }
}

double ExactSum::value() const {
  if (digits_[kDigits] != 0) return std::numeric_limits<double>::quiet_NaN();
  std::vector<uint32_t> normal;  // digits below 2^32, the lowest first
  uint64_t carry = 0;
  for (int i = 0; i < kDigits; ++i) {
    const auto digit = static_cast<uint64_t>(digits_[i]);
    const uint64_t low = (digit & kLow) + (carry & kLow);
    normal.push_back(static_cast<uint32_t>(low));
    carry = (digit >> kBits) + (carry >> kBits) + (low >> kBits);
  }
  while (carry != 0) {
    normal.push_back(static_cast<uint32_t>(carry));
    carry >>= kBits;
  }
  auto top = static_cast<int>(normal.size()) - 1;
  while (top > 0 && normal[top] == 0) --top;
  // The first three digits have at least 65 bits, more than the result.
  double result = 0;
  for (int i = std::max(0, top - 2); i <= top; ++i) {
    result += std::ldexp(static_cast<double>(normal[i]), kBits * i + kLeastExponent);
  }
  return result;
}

}  // namespace train
