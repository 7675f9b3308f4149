#include "group_muon/cpu_gram.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <utility>

#include "group_muon/products.h"

namespace group_muon {
namespace {

using at::Tensor;
using c10::BFloat16;

// Beside a direction with much of the norm, what is small drowns in the rounding of R and grows from step
// to step, so such blocks start anew more often. With R in fp32 that costs nothing, so all do.
struct Restarts {
  std::vector<int64_t> of_dominated;
  std::vector<int64_t> of_others;
};

Restarts restarts_for(const OrthogonalizeOptions& options) {
  if (!options.restarts.empty()) return {options.restarts, options.restarts};
  const auto tight = gram_restarts(options.coefficients, kTightCondition);
  if (options.method == Method::kAccurateGram) return {tight, tight};
  return {tight, gram_restarts(options.coefficients, kLooseCondition)};
}

// One block's iteration. R, Z, Q and W are short × short, in type Small; X and Y as the block.
template <typename Small>
class BlockIteration {
 public:
  BlockIteration(int64_t rows, int64_t cols, bool shared) : shared_(shared) {
    const int64_t short_side = std::min(rows, cols), square = short_side * short_side;
    memory_ = at::empty({4 * square}, c10::CppTypeToScalarType<Small>::value);
    bf16_memory_ = at::empty({rows * cols + square}, at::kBFloat16);
    auto* place = memory_.data_ptr<Small>();
    for (auto* matrix : {&r_, &z_, &q_, &w_}) {
      *matrix = {place, short_side, short_side, short_side};
      place += square;
    }
    y_ = bf16_memory_.data_ptr<BFloat16>();
    factor_ = y_ + rows * cols;
  }

  /// in → out; `in` is kept.
  void run(const GramBlock& block, const OrthogonalizeOptions& options, const Restarts& restarts) {
    MatrixView<const BFloat16> x = {block.in, block.rows, block.cols, block.cols};
    float scale = block.scale;
    gram(x, scale);
    auto bounds = is_dominated() ? restarts.of_dominated : restarts.of_others;
    bounds.push_back(static_cast<int64_t>(options.coefficients.size()));
    // The last phase ends in `out`, the ones before alternate with it.
    BFloat16 *result = block.out, *other = y_;
    if (bounds.size() % 2 == 0) std::swap(result, other);
    auto begin = options.coefficients.begin();
    for (const auto bound : bounds) {
      if (begin != options.coefficients.begin()) gram(x, scale);
      const auto end = options.coefficients.begin() + bound;
      accumulate_factor(begin, end);
      apply_factor(x, scale, {result, block.rows, block.cols, block.cols});
      x.data = result;
      std::swap(result, other);
      scale = 1;
      begin = end;
    }
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

  // Q ← the product of the factors (aI + bR + cR²) of these steps, starting from this R.
  void accumulate_factor(Step step, const Step& end) {
    for (bool first = true; step != end; ++step, first = false) {
      const auto a = static_cast<float>(step->a), b = static_cast<float>(step->b);
      const auto c = static_cast<float>(step->c);
      symmetric(r_, r_, z_, r_, c, b);
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

  // out = scale·QX, or scale·XQ for a tall X.
  void apply_factor(
      const MatrixView<const BFloat16>& x, float scale, const MatrixView<BFloat16>& out) {
    MatrixView<const BFloat16> q = {nullptr, q_.rows, q_.cols, q_.stride};
    if constexpr (std::is_same_v<Small, BFloat16>) {
      q.data = q_.data;
    } else {
      std::copy_n(q_.data, q_.rows * q_.cols, factor_);
      q.data = factor_;
    }
    const bool tall = x.rows > x.cols;
    const Product<BFloat16, BFloat16> product{
        .a = tall ? x : q, .b = tall ? q : x, .out = out, .alpha = scale};
    shared_ ? multiply_shared(product) : multiply(product);
  }

  bool shared_;
  Tensor memory_, bf16_memory_;
  Matrix r_, z_, q_, w_;
  BFloat16 *y_, *factor_;
};

template <typename Small>
void run_blocks(const std::vector<GramBlock>& blocks, const OrthogonalizeOptions& options) {
  const Restarts restarts = restarts_for(options);
  const auto count = static_cast<int64_t>(blocks.size());
  const int64_t rows = blocks[0].rows, cols = blocks[0].cols;
  const int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  const int64_t even = count / threads * threads;
  at::parallel_for(0, even, std::max<int64_t>(1, even / threads), [&](int64_t begin, int64_t end) {
    BlockIteration<Small> iteration(rows, cols, /*shared=*/false);
    for (int64_t i = begin; i < end; ++i) iteration.run(blocks[i], options, restarts);
  });
  if (even < count) {
    BlockIteration<Small> iteration(rows, cols, /*shared=*/true);
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
