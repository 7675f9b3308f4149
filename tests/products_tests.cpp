#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>

#include "group_muon/products.h"
#include "testing.h"

namespace group_muon {
namespace {

using torch::Tensor;

template <typename T>
MatrixView<T> view(const Tensor& tensor) {
  auto* data = tensor.data_ptr<std::remove_const_t<T>>();
  return {data, tensor.size(0), tensor.size(1), tensor.stride(0)};
}

double error(const Tensor& actual, const Tensor& expected) {
  return ((actual.to(torch::kDouble) - expected).norm() / expected.norm()).item<double>();
}

Tensor wide(const Tensor& tensor) { return tensor.to(torch::kDouble); }

// torch's name of a type, and the error of one rounding to it plus fp32 sums.
template <typename T>
constexpr auto kType = c10::CppTypeToScalarType<T>::value;
template <typename T>
constexpr double kTolerance = std::is_same_v<T, float> ? 1e-5 : 0.005;

class ProductsTest : public testing::Test {
 protected:
  ProductsTest() { torch::manual_seed(0); }
};

// The engine under test.
const Engine kEngine = engines_here().back();
const bool kHasBf16 = computes_in(kEngine, torch::kBFloat16);

// Runs a product in both ways, with several numbers of threads. All results must be equal bit for bit.
template <typename In, typename Out>
void run_both(const Product<In, Out>& product, bool symmetric, const Tensor& out) {
  const Tensor before = out.clone();
  symmetric ? multiply_symmetric(kEngine, product) : multiply(kEngine, product);
  const Tensor alone = out.clone();
  const int all = at::get_num_threads();
  for (const int threads : {1, 2, 3, 4}) {
    at::set_num_threads(threads);
    out.copy_(before);
    symmetric ? multiply_symmetric_shared(kEngine, product) : multiply_shared(kEngine, product);
    EXPECT_TRUE(out.equal(alone)) << threads << " threads";
  }
  at::set_num_threads(all);
}

template <typename In, typename Out>
void check_products() {
  for (const auto [m, k, n] : std::vector<std::array<int64_t, 3>>{
           {1, 1, 1},
           {8, 2, 48},
           {7, 3, 5},
           {9, 33, 17},
           {13, 7, 49},
           {64, 64, 200},
           {300, 31, 97},
           {530, 65, 33}}) {
    for (const bool transpose_a : {false, true}) {
      for (const bool transpose_b : {false, true}) {
        const Tensor a = torch::randn({m, k}).to(kType<In>), b = torch::randn({k, n}).to(kType<In>);
        const Tensor a_there = transpose_a ? a.t().contiguous() : a;
        const Tensor b_there = transpose_b ? b.t().contiguous() : b;
        const Tensor d = torch::randn({m, n}).to(kType<Out>);
        const Tensor out = torch::full({m, n}, 7, kType<Out>);
        Product<In, Out> product{
            .a = view<const In>(a_there),
            .b = view<const In>(b_there),
            .out = view<Out>(out),
            .alpha = 0.5F,
            .transpose_a = transpose_a,
            .transpose_b = transpose_b};
        run_both(product, false, out);
        const Tensor plain = 0.5 * wide(a).mm(wide(b));
        EXPECT_LT(error(out, plain), kTolerance<Out>) << m << " " << k << " " << n;
        product.d = d.template data_ptr<Out>();
        product.beta = -2;
        run_both(product, false, out);
        EXPECT_LT(error(out, plain - 2 * wide(d)), kTolerance<Out>) << m << " " << k << " " << n;
        out.copy_(d);
        product.d = product.out.data;  // adds to the existing values
        product.beta = 1;
        run_both(product, false, out);
        EXPECT_LT(error(out, plain + wide(d)), kTolerance<Out>) << m << " " << k << " " << n;
      }
    }
  }
}

TEST_F(ProductsTest, AnyShapeTransposedOrNot) {
  if (kHasBf16) check_products<c10::BFloat16, c10::BFloat16>();
  if (kHasBf16) check_products<c10::BFloat16, float>();
  check_products<float, float>();
}

template <typename In, typename Out>
void check_packed() {
  for (const auto [depth, cols] : std::vector<std::array<int64_t, 2>>{
           {1, 1}, {16, 128}, {128, 16}, {33, 7}, {130, 50}, {513, 20}, {700, 33}, {1100, 64}}) {
    for (const bool transpose : {false, true}) {
      const Tensor b = torch::randn({depth, cols}).to(kType<In>);
      const Tensor there = transpose ? b.t().contiguous() : b;
      PackedRight<In> packed;
      pack(kEngine, view<const In>(torch::randn({90, 90}).to(kType<In>)), false, packed);
      pack(kEngine, view<const In>(there), transpose, packed);  // overwrites it
      for (const auto [k, n] : std::vector<std::array<int64_t, 2>>{
               {depth, cols}, {depth, (cols + 1) / 2}, {depth / 4 * 2, cols}, {0, cols}}) {
        const Tensor a = torch::randn({33, k}).to(kType<In>);
        const Tensor out = torch::full({33, n}, 7, kType<Out>), same = torch::empty_like(out);
        Product<In, Out> product{
            .a = view<const In>(a), .b = {}, .out = view<Out>(out), .alpha = 0.5F};
        multiply_packed(kEngine, product, packed);
        const Tensor part = b.narrow(0, 0, k).narrow(1, 0, n).contiguous();
        const Tensor expected = 0.5 * wide(a).mm(wide(part));
        if (k == 0) {
          EXPECT_TRUE(out.equal(torch::zeros_like(out)));
        } else {
          EXPECT_LT(error(out, expected), kTolerance<Out>) << k << " " << n;
        }
        const Tensor d = torch::randn({33, n}).to(kType<Out>);
        product.d = d.template data_ptr<Out>();
        product.beta = -2;
        multiply_packed(kEngine, product, packed);
        EXPECT_LT(error(out, expected - 2 * wide(d)), kTolerance<Out>) << k << " " << n;
        product.b = view<const In>(part);
        product.out = view<Out>(same);
        multiply(kEngine, product);
        EXPECT_TRUE(out.equal(same)) << k << " " << n;
      }
    }
  }
}

TEST_F(ProductsTest, ProductsThatDoNotFitWhatWasPackedAreRejected) {
  const Tensor b = torch::randn({20, 30}), a = torch::randn({4, 22}), out = torch::empty({4, 30});
  PackedRight<float> packed;
  pack(kEngine, view<const float>(b), false, packed);
  const Product<float, float> product{.a = view<const float>(a), .b = {}, .out = view<float>(out)};
  EXPECT_ERROR_SAYS(multiply_packed(kEngine, product, packed), "does not fit what was packed");
}

TEST_F(ProductsTest, WhatIsPackedOnceGivesTheSameProducts) {
  if (kHasBf16) check_packed<c10::BFloat16, c10::BFloat16>();
  if (kHasBf16) check_packed<c10::BFloat16, float>();
  check_packed<float, float>();
}

template <typename In, typename Out>
void check_symmetric() {
  for (const auto [n, k] : std::vector<std::array<int64_t, 2>>{
           {1, 1}, {5, 3}, {16, 32}, {48, 64}, {49, 31}, {64, 100}, {97, 101}, {200, 48}}) {
    for (const bool tall : {false, true}) {
      const Tensor x = torch::randn({n, k}).to(kType<In>);
      const Tensor there = tall ? x.t().contiguous() : x;
      const Tensor out = torch::full({n, n}, 7, kType<Out>);
      run_both(
          Product<In, Out>{
              .a = view<const In>(there),
              .b = view<const In>(there),
              .out = view<Out>(out),
              .transpose_a = tall,
              .transpose_b = !tall},
          true, out);
      EXPECT_LT(error(out, wide(x).mm(wide(x).t())), kTolerance<Out>) << n << " " << k;
      EXPECT_TRUE(out.equal(out.t())) << n << " " << k;
      // Commuting symmetric matrices, with a third added.
      const Tensor square = torch::empty_like(out);
      run_both(
          Product<Out, Out>{
              .a = view<const Out>(out),
              .b = view<const Out>(out),
              .out = view<Out>(square),
              .d = out.template data_ptr<Out>(),
              .alpha = 2,
              .beta = 3},
          true, square);
      EXPECT_LT(error(square, 2 * wide(out).mm(wide(out)) + 3 * wide(out)), kTolerance<Out>);
      EXPECT_TRUE(square.equal(square.t())) << n << " " << k;
    }
  }
}

TEST_F(ProductsTest, SymmetricResultsAreExactlySymmetric) {
  if (kHasBf16) check_symmetric<c10::BFloat16, c10::BFloat16>();
  if (kHasBf16) check_symmetric<c10::BFloat16, float>();
  check_symmetric<float, float>();
}

template <typename T>
void check_rows_apart() {
  const Tensor all = torch::randn({20, 60}).to(kType<T>);
  const Tensor a = all.slice(1, 0, 30), b = all.slice(1, 30, 60);
  const Tensor around = torch::zeros({20, 64}, kType<T>);
  const Tensor out = around.slice(1, 8, 28);
  multiply(
      kEngine,
      Product<T, T>{
          .a = view<const T>(a), .b = view<const T>(b), .out = view<T>(out), .transpose_b = true});
  EXPECT_LT(error(out, wide(a).mm(wide(b).t())), kTolerance<T>);
  EXPECT_EQ(around.slice(1, 0, 8).abs().sum().template item<double>(), 0);
  EXPECT_EQ(around.slice(1, 28, 64).abs().sum().template item<double>(), 0);
}

TEST_F(ProductsTest, RowsMayLieApartAndNothingBesideThemIsWritten) {
  check_rows_apart<float>();
  if (kHasBf16) check_rows_apart<c10::BFloat16>();
}

// A is packed in strips, and sums are longer than one pass.
TEST_F(ProductsTest, LargeProductsAreTheSame) {
  for (const auto [m, k, n] :
       std::vector<std::array<int64_t, 3>>{{1031, 530, 700}, {64, 1300, 1100}, {300, 1025, 290}}) {
    const Tensor a = torch::randn({m, k}), b = torch::randn({k, n}), out = torch::empty({m, n});
    for (const bool transpose_a : {false, true}) {
      const Tensor there = transpose_a ? a.t().contiguous() : a;
      run_both(
          Product<float, float>{
              .a = view<const float>(there),
              .b = view<const float>(b),
              .out = view<float>(out),
              .transpose_a = transpose_a},
          false, out);
      EXPECT_LT(error(out, wide(a).mm(wide(b))), 1e-5) << m << " " << k << " " << n;
    }
  }
}

TEST_F(ProductsTest, LargeSymmetricProductsAreTheSame) {
  for (const auto [n, k] :
       std::vector<std::array<int64_t, 2>>{{200, 1111}, {300, 1200}, {700, 1111}, {384, 1536}}) {
    for (const bool tall : {false, true}) {
      const Tensor x = torch::randn({n, k}), gram = torch::empty({n, n});
      const Tensor there = tall ? x.t().contiguous() : x;
      run_both(
          Product<float, float>{
              .a = view<const float>(there),
              .b = view<const float>(there),
              .out = view<float>(gram),
              .transpose_a = tall,
              .transpose_b = !tall},
          true, gram);
      EXPECT_LT(error(gram, wide(x).mm(wide(x).t())), 1e-5) << n << " " << k << " " << tall;
      EXPECT_TRUE(gram.equal(gram.t())) << n << " " << k << " " << tall;
      // Sums longer than one pass, with a third matrix added.
      const Tensor square = torch::empty_like(gram);
      run_both(
          Product<float, float>{
              .a = view<const float>(gram),
              .b = view<const float>(gram),
              .out = view<float>(square),
              .d = gram.data_ptr<float>(),
              .alpha = 2,
              .beta = 3},
          true, square);
      EXPECT_LT(error(square, 2 * wide(gram).mm(wide(gram)) + 3 * wide(gram)), 1e-5);
      EXPECT_TRUE(square.equal(square.t())) << n << " " << k << " " << tall;
    }
  }
}

TEST_F(ProductsTest, NothingTimesSomethingIsNothing) {
  for (const auto [m, k, n] :
       std::vector<std::array<int64_t, 3>>{{0, 3, 4}, {3, 0, 4}, {3, 4, 0}, {0, 0, 0}}) {
    for (const bool transpose : {false, true}) {
      const Tensor a = torch::ones(transpose ? std::vector{k, m} : std::vector{m, k});
      const Tensor b = torch::ones({k, n}), out = torch::full({m, n}, 7.0F);
      run_both(
          Product<float, float>{
              .a = view<const float>(a),
              .b = view<const float>(b),
              .out = view<float>(out),
              .transpose_a = transpose},
          false, out);
      EXPECT_TRUE(out.equal(torch::zeros({m, n})));
    }
  }
}

template <typename In>
void check_beyond_the_edge() {
  // An odd inner size leaves half of the last bf16 pair empty. What follows it in memory must not count.
  for (const auto& [stride, inner] : std::vector<std::pair<int64_t, int64_t>>{{8, 5}, {2, 1}}) {
    const Tensor around = torch::full({9, stride}, std::nan(""), kType<In>);
    const Tensor a = around.slice(1, 0, inner);
    a.fill_(1);
    const Tensor out = torch::empty({9, 9});
    multiply(
        kEngine, Product<In, float>{
                     .a = view<const In>(a),
                     .b = view<const In>(a),
                     .out = view<float>(out),
                     .transpose_b = true});
    EXPECT_TRUE(out.equal(torch::full({9, 9}, static_cast<double>(inner), torch::kFloat)));
  }
}

TEST_F(ProductsTest, ZeroTimesNanBeyondTheEdgeDoesNotCount) {
  check_beyond_the_edge<float>();
  if (kHasBf16) check_beyond_the_edge<c10::BFloat16>();
}

}  // namespace
}  // namespace group_muon
