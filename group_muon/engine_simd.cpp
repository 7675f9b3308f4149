#include "group_muon/engine_simd.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "group_muon/engine_portable.h"
#include "group_muon/parallel.h"
#include "group_muon/products.h"

namespace group_muon {
namespace {

using at::Tensor;
using c10::BFloat16;

// The iteration of one block. R, Z, Q and W are short × short, of type Small; X, Y and the loaded block have type T.
template <typename T, typename Small>
class BlockIteration {
 public:
  BlockIteration(Engine engine, int64_t short_side, int64_t long_side, bool shared)
      : engine_(engine), shared_(shared) {
    const int64_t square = short_side * short_side, elements = short_side * long_side;
    memory_ = at::empty({4 * square}, c10::CppTypeToScalarType<Small>::value);
    block_memory_ = at::empty({3 * elements + square}, c10::CppTypeToScalarType<T>::value);
    auto* place = memory_.data_ptr<Small>();
    for (auto* matrix : {&r_, &z_, &q_, &w_}) {
      *matrix = {place, short_side, short_side, short_side};
      place += square;
    }
    in_ = block_memory_.data_ptr<T>();
    x_ = in_ + elements;
    y_ = x_ + elements;
    factor_ = y_ + elements;
  }

  void run(
      const SimdBlock<T>& block, const OrthogonalizeOptions& options, const Restarts& restarts) {
    float scale = block.load(in_);
    MatrixView<const T> x = {in_, block.rows, block.cols, block.cols};
    gram(x, scale);
    auto bounds = restarts.differ() && is_dominated() ? restarts.of_dominated : restarts.of_others;
    bounds.push_back(static_cast<int64_t>(options.coefficients.size()));
    T *result = x_, *other = y_;
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

  // R ← scale²·XXᵀ, or scale²·XᵀX for a tall X.
  void gram(const MatrixView<const T>& x, float scale) {
    const bool tall = x.rows > x.cols;
    symmetric(
        Product<T, Small>{
            .a = x,
            .b = x,
            .out = r_,
            .alpha = scale * scale,
            .transpose_a = tall,
            .transpose_b = !tall});
  }

  // Whether one direction of X has much of the norm. ‖R‖ is the square root of Σσ⁴.
  bool is_dominated() const {
    constexpr float kDominated = 0.4F;
    float squares = 0;
    for (int64_t i = 0; i < r_.rows * r_.cols; ++i) {
      const auto entry = static_cast<float>(r_.data[i]);
      squares += entry * entry;
    }
    return !(squares < kDominated * kDominated);
  }

  // Q ← the product of the factors (aI + bR + cR²) of these steps, starting from the current R. For a single step aI
  // is left out: applied separately, it is exact.
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

  // out = alpha·A·B + beta·D for commuting symmetric matrices.
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
    shared_ ? multiply_symmetric_shared(engine_, product) : multiply_symmetric(engine_, product);
  }

  // Subtracts the mean of Q's diagonal from it and returns the mean.
  float take_mean_of_diagonal() {
    float sum = 0;
    for (int64_t i = 0; i < q_.rows; ++i) sum += q_.data[i * (q_.stride + 1)];
    const float mean = sum / static_cast<float>(q_.rows);
    for (int64_t i = 0; i < q_.rows; ++i) q_.data[i * (q_.stride + 1)] -= mean;
    return mean;
  }

  // out = scale·(Q + identity·I)X, or scale·X(Q + identity·I) for a tall X.
  void apply_factor(
      const MatrixView<const T>& x, float scale, float identity, const MatrixView<T>& out) {
    MatrixView<const T> q = {nullptr, q_.rows, q_.cols, q_.stride};
    if constexpr (std::is_same_v<Small, T>) {
      q.data = q_.data;
    } else {
      // Without the part that all directions share, rounding loses less.
      identity += take_mean_of_diagonal();
      std::copy_n(q_.data, q_.rows * q_.cols, factor_);
      q.data = factor_;
    }
    const bool tall = x.rows > x.cols;
    const Product<T, T> product{
        .a = tall ? x : q,
        .b = tall ? q : x,
        .out = out,
        .d = identity == 0 ? nullptr : x.data,
        .alpha = scale,
        .beta = scale * identity};
    shared_ ? multiply_shared(engine_, product) : multiply(engine_, product);
  }

  Engine engine_;
  bool shared_;
  Tensor memory_, block_memory_;
  Matrix r_, z_, q_, w_;
  T *in_, *x_, *y_, *factor_;
};

template <typename T, typename Small>
void run_blocks(const std::vector<SimdBlock<T>>& blocks, const OrthogonalizeOptions& options) {
  const auto count = static_cast<int64_t>(blocks.size());
  const auto [short_side, long_side] = std::minmax(blocks[0].rows, blocks[0].cols);
  const Restarts restarts = restarts_for(short_side, long_side, options);
  const int64_t threads = threads_here();
  const int64_t even = count / threads * threads;
  const auto run = [&, shortest = short_side, longest = long_side](
                       int64_t begin, int64_t end, bool shared) {
    BlockIteration<T, Small> iteration(options.engine, shortest, longest, shared);
    for (int64_t i = begin; i < end; ++i) iteration.run(blocks[i], options, restarts);
  };
  share_out(even, std::max<int64_t>(1, even / threads), [&](int64_t begin, int64_t end) {
    run(begin, end, /*shared=*/false);
  });
  if (even < count) run(even, count, /*shared=*/true);
}

template <typename T>
Tensor orthogonalize_in(const Tensor& x, const OrthogonalizeOptions& options) {
  const Tensor in = normalized(x, options).contiguous();
  Tensor out = at::empty_like(in);
  const auto* from = in.const_data_ptr<T>();
  auto* to = out.data_ptr<T>();
  const int64_t rows = x.size(1), cols = x.size(2), size = rows * cols;
  std::vector<SimdBlock<T>> blocks;
  for (int64_t i = 0; i < x.size(0); ++i) {
    const int64_t offset = i * size;
    blocks.push_back(
        {.rows = rows,
         .cols = cols,
         .load =
             [=](T* block) {
               std::copy_n(from + offset, size, block);
               return 1.0F;
             },
         .store = [=](const T* block) { std::copy_n(block, size, to + offset); }});
  }
  orthogonalize_simd(blocks, options);
  return out;
}

}  // namespace

Restarts restarts_for(int64_t short_side, int64_t long_side, const OrthogonalizeOptions& options) {
  constexpr double kNearlySquare = 1.5;
  if (!options.restarts.empty()) return {options.restarts, options.restarts};
  if (static_cast<double>(long_side) < kNearlySquare * static_cast<double>(short_side)) {
    std::vector<int64_t> all(options.coefficients.size() - 1);
    std::iota(all.begin(), all.end(), 1);
    return {all, all};
  }
  if (options.precision == at::kFloat) {
    const auto all = gram_restarts(options.coefficients, kFloatCondition);
    return {all, all};
  }
  return {
      gram_restarts(options.coefficients, kTightCondition),
      gram_restarts(options.coefficients, kLooseCondition)};
}

template <typename T>
void orthogonalize_simd(
    const std::vector<SimdBlock<T>>& blocks, const OrthogonalizeOptions& options) {
  if (blocks.empty()) return;
  if (options.method == Method::kAccurateGram) {
    run_blocks<T, float>(blocks, options);
  } else {
    run_blocks<T, T>(blocks, options);
  }
}

template void orthogonalize_simd(const std::vector<SimdBlock<float>>&, const OrthogonalizeOptions&);
template void orthogonalize_simd(
    const std::vector<SimdBlock<BFloat16>>&, const OrthogonalizeOptions&);

Tensor orthogonalize_simd(const Tensor& x, const OrthogonalizeOptions& options) {
  return options.precision == at::kFloat ? orthogonalize_in<float>(x, options)
                                         : orthogonalize_in<BFloat16>(x, options);
}

}  // namespace group_muon
