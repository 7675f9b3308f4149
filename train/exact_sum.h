#pragma once
// A sum that depends on its numbers alone: not on their order, and not on which process adds which of them.

#include <cstdint>
#include <utility>
#include <vector>

namespace train {

/// The exact sum of fp64 numbers that are 0 or more.
class ExactSum {
 public:
  void add(double number);
  /// The sum to about one rounding error, the same bits for the same sum. NaN if a number was not finite.
  double value() const;

  /// The sum as whole numbers. Those of several sums can be added one by one to get the sum of all.
  const std::vector<int64_t>& digits() const { return digits_; }
  void set_digits(std::vector<int64_t> digits) { digits_ = std::move(digits); }

 private:
  // Each counts units of 2^(32·index - 1074), so it has room for 2^31 numbers. The last counts numbers that were not
  // finite.
  static constexpr int kDigits = 67;
  std::vector<int64_t> digits_ = std::vector<int64_t>(kDigits + 1, 0);
};

}  // namespace train
