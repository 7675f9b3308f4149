#pragma once
// Algorithm 1, literally: a loop over groups, one matrix at a time, no library code. Tests compare the optimizer with
// it.

#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <vector>

namespace reference {

using torch::Tensor;
using Rows = std::vector<int64_t>;

/// Heads of one kind: the rows of each head and the heads of each group.
struct Family {
  std::vector<Rows> heads;
  std::vector<Rows> groups;
};

struct Settings {
  double lr = 0.1;
  double momentum = 0.95;
  bool nesterov = false;
  bool average = false;
  double weight_decay = 0;
  torch::ScalarType precision = torch::kDouble;
  /// What is done to a block before it is orthogonalized.
  std::function<Tensor(const Tensor&)> before = [](const Tensor& block) { return block; };
  /// Learning-rate factor of a block of out × in.
  std::function<double(int64_t, int64_t)> scale = [](int64_t out, int64_t in) {
    return std::sqrt(static_cast<double>(std::max(out, in)));
  };
};

/// Five quintic Newton–Schulz steps on one matrix.
inline Tensor newton_schulz(const Tensor& g, torch::ScalarType precision) {
  Tensor x = (g / (g.norm() * (1 + 1e-7))).to(precision);
  const bool tall = x.size(0) > x.size(1);
  if (tall) x = x.t();
  for (int step = 0; step < 5; ++step) {
    const Tensor a = x.mm(x.t());
    const Tensor b = -4.7750 * a + 2.0315 * a.mm(a);
    x = 3.4445 * x + b.mm(x);
  }
  return tall ? x.t() : x;
}

inline Tensor index(const Rows& rows) { return torch::tensor(rows, torch::kLong); }

/// One step on a matrix with heads along rows, stored out × in. Updates w and m in place.
inline void step(
    Tensor& w, const Tensor& g, Tensor& m, const std::vector<Family>& families, const Settings& s) {
  w.mul_(1 - s.lr * s.weight_decay);
  for (const auto& family : families) {
    for (const auto& group : family.groups) {
      Rows rows;  // Concat({G_h : h ∈ P})
      for (const auto head : group) {
        rows.insert(rows.end(), family.heads[head].begin(), family.heads[head].end());
      }
      const Tensor group_g = g.index_select(0, index(rows));
      Tensor group_m = m.index_select(0, index(rows));
      group_m = s.momentum * group_m + (s.average ? 1 - s.momentum : 1.0) * group_g;
      Tensor direction = group_m;
      if (s.nesterov) {
        direction = s.momentum * group_m + (s.average ? 1 - s.momentum : 1.0) * group_g;
      }
      const Tensor o = newton_schulz(s.before(direction), s.precision).to(w.scalar_type());
      const double factor = s.lr * s.scale(direction.size(0), direction.size(1));
      for (size_t i = 0; i < rows.size(); ++i) {
        w[rows[i]] -= factor * o[i];
        m[rows[i]] = group_m[i];
      }
    }
  }
}

/// Rows of `count` heads. The first starts at `first`, the next ones every `stride` rows.
inline std::vector<Rows> heads(int64_t count, int64_t size, int64_t first, int64_t stride) {
  std::vector<Rows> result;
  for (int64_t h = 0; h < count; ++h) {
    Rows rows;
    for (int64_t r = 0; r < size; ++r) rows.push_back(first + h * stride + r);
    result.push_back(rows);
  }
  return result;
}

/// {0 … g-1}, {g … 2g-1}, …
inline std::vector<Rows> adjacent(int64_t count, int64_t g) {
  std::vector<Rows> groups;
  for (int64_t first = 0; first < count; first += g) {
    Rows group;
    for (int64_t h = first; h < first + g; ++h) group.push_back(h);
    groups.push_back(group);
  }
  return groups;
}

/// {j, j + K, …, j + (g-1)K} with K = count / g.
inline std::vector<Rows> interval(int64_t count, int64_t g) {
  const int64_t k = count / g;
  std::vector<Rows> groups;
  for (int64_t j = 0; j < k; ++j) {
    Rows group;
    for (int64_t i = 0; i < g; ++i) group.push_back(j + i * k);
    groups.push_back(group);
  }
  return groups;
}

/// A permutation cut into runs of g.
inline std::vector<Rows> runs(const Rows& order, int64_t g) {
  std::vector<Rows> groups;
  for (size_t i = 0; i < order.size(); i += g) {
    groups.emplace_back(order.begin() + i, order.begin() + i + g);
  }
  return groups;
}

}  // namespace reference
