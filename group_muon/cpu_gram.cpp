#include "group_muon/cpu_gram.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "group_muon/products.h"

namespace group_muon {
namespace {

using at::Tensor;
using c10::BFloat16;

// After every step where blocks are nearly square: products with X cost no more than those of small matrices then, and
// rounding is least. Else, beside a direction with much of the norm, what is small drowns in the rounding of R and
// grows from step to step, so such blocks start anew more often.
struct Restarts {
  std::vector<int64_t> of_dominated;
  std::vector<int64_t> of_others;
};

Restarts restarts_for(int64_t short_side, int64_t long_side, const OrthogonalizeOptions& options) {
  constexpr double kNearlySquare = 1.5;
  if (!options.restarts.empty()) return {options.restarts, options.restarts};
  if (static_cast<double>(long_side) < kNearlySquare * static_cast<double>(short_side)) {
    std::vector<int64_t> all(options.coefficients.size() - 1);
    std::iota(all.begin(), all.end(), 1);
    return {all, all};
  }
  return {
      gram_restarts(options.coefficients, kTightCondition),
      gram_restarts(options.coefficients, kLooseCondition)};
}

// One block's iteration. R, Z, Q and W are short × short, in type Small; X, Y and the block as it is loaded in bf16.
template <typename Small>
class BlockIteration {
 public:
  BlockIteration(int64_t short_side, int64_t long_side, bool shared) : shared_(shared) {
    const int64_t square = short_side * short_side, elements = short_side * long_side;
    memory_ = at::empty({4 * square}, c10::CppTypeToScalarType<Small>::value);
    bf16_memory_ = at::empty({3 * elements + square}, at::kBFloat16);
    auto* place = memory_.data_ptr<Small>();
    for (auto* matrix : {&r_, &z_, &q_, &w_}) {
      *matrix = {place, short_side, short_side, short_side};
      place += square;
    }
    in_ = bf16_memory_.data_ptr<BFloat16>();
    x_ = in_ + elements;
    y_ = x_ + elements;
    factor_ = y_ + elements;
  }

  void run(const GramBlock& block, const OrthogonalizeOptions& options, const Restarts& restarts) {
    float scale = block.load(in_);
    MatrixView<const BFloat16> x = {in_, block.rows, block.cols, block.cols};
    gram(x, scale);
    auto bounds = is_dominated() ? restarts.of_dominated : restarts.of_others;
    bounds.push_back(static_cast<int64_t>(options.coefficients.size()));
    BFloat16 *result = x_, *other = y_;
    auto begin = options.coefficients.begin();
    for (const auto bound : bounds) {
      if (begin != options.coefficients.begin()) gram(x, scale);
      const auto end = options.coefficients.begin() + bound;
      accumulate_factor(begin, end);
      const auto identity = end - begin == 1 ? static_cast<float>(begin->a) : 0;
      apply_factor(x, scale, identity, {result, block.rows, block.cols, block.cols});
      x.data = result;
      std::swap(result, other);
      scale = 1;
      begin = end;
    }
    block.store(x.data);
  }

 private:
  using Step = std::vector<Coefficients>::const_iterator;
  using Matrix = MatrixView<Small>;

  // R ← scale²·XXᵀ, or XᵀX of a tall X.
  void gram(const MatrixView<const BFloat16>& x, float scale) {
    const bool tall = x.rows > x.cols;
    symmetric(
        Product<BFloat16, Small>{
            .a = x,
            .b = x,
            .out = r_,
            .alpha = scale * scale,
            .transpose_a = tall,
            .transpose_b = !tall});
  }

  // Whether some direction of X has much of the norm. ‖R‖ is the root of the sum of σ⁴.
  bool is_dominated() const {
    constexpr float kDominated = 0.4F;
    float squares = 0;
    for (int64_t i = 0; i < r_.rows * r_.cols; ++i) {
      const auto entry = static_cast<float>(r_.data[i]);
      squares += entry * entry;
    }
    return !(squares < kDominated * kDominated);
  }

  // Q ← the product of the factors (aI + bR + cR²) of these steps, starting from this R; of a single one
  // without its aI, which is exact when applied apart.
  void accumulate_factor(Step step, const Step& end) {
    const bool single = step + 1 == end;
    for (bool first = true; step != end; ++step, first = false) {
      const auto a = static_cast<float>(step->a), b = static_cast<float>(step->b);
      const auto c = static_cast<float>(step->c);
      symmetric(r_, r_, single ? q_ : z_, r_, c, b);
      if (single) return;
      if (first) {
        std::copy_n(z_.data, z_.rows * z_.cols, q_.data);
        for (int64_t i = 0; i < q_.rows; ++i) {
          auto& entry = q_.data[i * q_.stride + i];
          entry = static_cast<float>(entry) + a;
        }
      } else {
        symmetric(q_, z_, w_, q_, 1, a);
        std::swap(q_, w_);
      }
      if (step + 1 == end) return;
      symmetric(r_, z_, w_, r_, 1, a);  // RZ
      symmetric(z_, w_, r_, w_, 1, a);  // (aI + Z)RZ
    }
  }

  // out = alpha·A·B + beta·D of symmetric matrices that commute.
  void symmetric(
      const Matrix& a, const Matrix& b, const Matrix& out, const Matrix& d, float alpha,
      float beta) {
    symmetric(
        Product<Small, Small>{
            .a = {a.data, a.rows, a.cols, a.stride},
            .b = {b.data, b.rows, b.cols, b.stride},
            .out = out,
            .d = d.data,
            .alpha = alpha,
            .beta = beta});
  }

  template <typename In>
  void symmetric(const Product<In, Small>& product) {
    shared_ ? multiply_symmetric_shared(product) : multiply_symmetric(product);
  }

  // Subtracts it from Q's diagonal.
  float take_mean_of_diagonal() {
    float sum = 0;
    for (int64_t i = 0; i < q_.rows; ++i) sum += q_.data[i * (q_.stride + 1)];
    const float mean = sum / static_cast<float>(q_.rows);
    for (int64_t i = 0; i < q_.rows; ++i) q_.data[i * (q_.stride + 1)] -= mean;
    return mean;
  }

  // out = scale·(Q + identity·I)X, or scale·X(Q + identity·I) for a tall X.
  void apply_factor(
      const MatrixView<const BFloat16>& x, float scale, float identity,
      const MatrixView<BFloat16>& out) {
    MatrixView<const BFloat16> q = {nullptr, q_.rows, q_.cols, q_.stride};
    if constexpr (std::is_same_v<Small, BFloat16>) {
      q.data = q_.data;
    } else {
      // Without what all directions share there is less to round.
      identity += take_mean_of_diagonal();
      std::copy_n(q_.data, q_.rows * q_.cols, factor_);
      q.data = factor_;
    }
    const bool tall = x.rows > x.cols;
    const Product<BFloat16, BFloat16> product{
        .a = tall ? x : q,
        .b = tall ? q : x,
        .out = out,
        .d = identity == 0 ? nullptr : x.data,
        .alpha = scale,
        .beta = scale * identity};
    shared_ ? multiply_shared(product) : multiply(product);
  }

  bool shared_;
  Tensor memory_, bf16_memory_;
  Matrix r_, z_, q_, w_;
  BFloat16 *in_, *x_, *y_, *factor_;
};

template <typename Small>
void run_blocks(const std::vector<GramBlock>& blocks, const OrthogonalizeOptions& options) {
  const auto count = static_cast<int64_t>(blocks.size());
  const auto [short_side, long_side] = std::minmax(blocks[0].rows, blocks[0].cols);
  const Restarts restarts = restarts_for(short_side, long_side, options);
  const int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  const int64_t even = count / threads * threads;
  at::parallel_for(
      0, even, std::max<int64_t>(1, even / threads),
      [&, shortest = short_side, longest = long_side](int64_t begin, int64_t end) {
        BlockIteration<Small> iteration(shortest, longest, /*shared=*/false);
        for (int64_t i = begin; i < end; ++i) iteration.run(blocks[i], options, restarts);
      });
  if (even < count) {
    BlockIteration<Small> iteration(short_side, long_side, /*shared=*/true);
    for (int64_t i = even; i < count; ++i) iteration.run(blocks[i], options, restarts);
  }
}

}  // namespace

bool can_use_cpu_gram(const OrthogonalizeOptions& options) {
  return may_be_gram(options.method) && options.precision == at::kBFloat16 &&
         !options.coefficients.empty() && has_products();
}

void cpu_gram(const std::vector<GramBlock>& blocks, const OrthogonalizeOptions& options) {
  if (blocks.empty()) return;
  if (options.method == Method::kAccurateGram) {
    run_blocks<float>(blocks, options);
  } else {
    run_blocks<BFloat16>(blocks, options);
  }
}

}  // namespace group_muon
