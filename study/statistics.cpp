#include "study/statistics.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

namespace study {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
constexpr double kLevel = 0.05;

// The continued fraction of the incomplete beta function (Lentz).
double beta_fraction(double a, double b, double x) {
  constexpr double kTiny = 1e-300, kClose = 1e-16;
  const auto guarded = [](double value) { return std::abs(value) < kTiny ? kTiny : value; };
  double c = 1, d = 1 / guarded(1 - (a + b) * x / (a + 1)), result = d;
  for (int m = 1; m < 1000; ++m) {
    const double even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m));
    const double odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1));
    double change = 1;
    for (const double term : {even, odd}) {
      d = 1 / guarded(1 + term * d);
      c = guarded(1 + term / c);
      change = c * d;
      result *= change;
    }
    if (std::abs(change - 1) < kClose) break;
  }
  return result;
}

// The regularized incomplete beta function.
double incomplete_beta(double a, double b, double x) {
  if (x <= 0) return 0;
  if (x >= 1) return 1;
  const double front = std::exp(
      std::lgamma(a + b) - std::lgamma(a) - std::lgamma(b) + a * std::log(x) + b * std::log1p(-x));
  if (x < (a + 1) / (a + b + 2)) return front * beta_fraction(a, b, x) / a;
  return 1 - front * beta_fraction(b, a, 1 - x) / b;
}

}  // namespace

Summary summarize(const std::vector<double>& values) {
  Summary result;
  result.count = static_cast<int64_t>(values.size());
  if (values.empty()) return {0, kNone, kNone};
  const auto count = static_cast<double>(values.size());
  result.mean = std::accumulate(values.begin(), values.end(), 0.0) / count;
  double squares = 0;
  for (const double value : values) squares += (value - result.mean) * (value - result.mean);
  result.deviation = values.size() < 2 ? kNone : std::sqrt(squares / (count - 1));
  return result;
}

double student_cdf(double t, double degrees) {
  const double tail = incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t)) / 2;
  return t < 0 ? tail : 1 - tail;
}

double student_quantile(double probability, double degrees) {
  if (probability < 0.5) return -student_quantile(1 - probability, degrees);
  double low = 0, high = 1;
  while (student_cdf(high, degrees) < probability) high *= 2;
  for (int i = 0; i < 200 && low < high; ++i) {
    const double middle = (low + high) / 2;
    if (middle == low || middle == high) break;
    (student_cdf(middle, degrees) < probability ? low : high) = middle;
  }
  return (low + high) / 2;
}

double sign_flip_p(const std::vector<double>& differences) {
  constexpr size_t kMostForAll = 20;
  constexpr int64_t kDraws = 1'000'000;
  const size_t count = differences.size();
  if (count == 0) return kNone;
  // Sums that differ only by rounding count as equal.
  const double sum = std::abs(std::accumulate(differences.begin(), differences.end(), 0.0));
  double scale = 0;
  for (const double difference : differences) scale += std::abs(difference);
  const double far = sum - 1e-12 * scale;
  const auto flipped = [&](uint64_t signs) {
    double total = 0;
    for (size_t i = 0; i < count; ++i)
      total += ((signs >> i) & 1) != 0 ? -differences[i] : differences[i];
    return std::abs(total);
  };
  if (count <= kMostForAll) {
    const uint64_t all = uint64_t{1} << count;
    int64_t farther = 0;
    for (uint64_t signs = 0; signs < all; ++signs) farther += flipped(signs) >= far ? 1 : 0;
    return static_cast<double>(farther) / static_cast<double>(all);
  }
  std::mt19937_64 generator(
      0);               // NOLINT(bugprone-random-generator-seed): the same p-value every time
  int64_t farther = 1;  // the observed signs
  for (int64_t draw = 0; draw < kDraws; ++draw) {
    double total = 0;
    uint64_t signs = 0;
    for (size_t i = 0; i < count; ++i) {
      if (i % 64 == 0) signs = generator();
      total += ((signs >> (i % 64)) & 1) != 0 ? -differences[i] : differences[i];
    }
    farther += std::abs(total) >= far ? 1 : 0;
  }
  return static_cast<double>(farther) / static_cast<double>(kDraws + 1);
}

Interval interval_of(const std::vector<double>& values, double alpha) {
  const auto summary = summarize(values);
  if (summary.count < 2) return {summary.mean, kNone, kNone};
  const auto count = static_cast<double>(summary.count);
  const double half =
      summary.deviation / std::sqrt(count) * student_quantile(1 - alpha / 2, count - 1);
  return {summary.mean, summary.mean - half, summary.mean + half};
}

Paired paired(const std::vector<double>& differences, int64_t comparisons) {
  const double shared = kLevel / static_cast<double>(std::max<int64_t>(1, comparisons));
  const auto single = interval_of(differences, kLevel), all = interval_of(differences, shared);
  Paired result;
  result.count = static_cast<int64_t>(differences.size());
  result.mean = single.mean;
  result.low = single.low;
  result.high = single.high;
  result.simultaneous_low = all.low;
  result.simultaneous_high = all.high;
  result.p = differences.size() < 2 ? kNone : sign_flip_p(differences);
  return result;
}

std::vector<double> holm(const std::vector<double>& p) {
  std::vector<size_t> order;
  for (size_t i = 0; i < p.size(); ++i) {
    if (!std::isnan(p[i])) order.push_back(i);
  }
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return p[a] < p[b]; });
  std::vector<double> corrected = p;
  double largest = 0;
  for (size_t rank = 0; rank < order.size(); ++rank) {
    const auto left = static_cast<double>(order.size() - rank);
    largest = std::max(largest, std::min(1.0, left * p[order[rank]]));
    corrected[order[rank]] = largest;
  }
  return corrected;
}

}  // namespace study
