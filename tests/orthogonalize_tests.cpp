#include <torch/torch.h>

#include <cmath>
#include <limits>

#include "group_muon/orthogonalize.h"
#include "testing.h"

namespace group_muon {
namespace {

using torch::Tensor;

// A matrix with these singular values and random singular vectors.
Tensor with_spectrum(const Tensor& sigma, int64_t rows, int64_t cols) {
  const int64_t k = sigma.size(0);
  const auto basis = [&](int64_t n) {
    return std::get<0>(torch::linalg_qr(torch::randn({n, k}, torch::kDouble)));
  };
  return basis(rows).mul(sigma).mm(basis(cols).t());
}

// k singular values between 1 and 1/condition, evenly spaced on a logarithmic scale.
Tensor spectrum(int64_t k, double condition) {
  return torch::logspace(0, -std::log10(condition), k, 10, torch::kDouble);
}

double scalar_iteration(double x, const std::vector<Coefficients>& coefficients) {
  for (const auto& [a, b, c] : coefficients) x = a * x + b * std::pow(x, 3) + c * std::pow(x, 5);
  return x;
}

OrthogonalizeOptions iteration(
    const std::string& name, int64_t steps = 5, Method method = Method::kNewtonSchulz,
    c10::ScalarType precision = torch::kDouble) {
  OrthogonalizeOptions options;
  options.method = method;
  options.coefficients = coefficient_list(name, steps, 0, method);
  if (is_gram(method)) options.restarts = gram_restarts(options.coefficients, kLooseCondition);
  options.precision = precision;
  options.eps = 0;
  return options;
}

OrthogonalizeOptions exact() { return {.method = Method::kExact, .precision = torch::kDouble}; }

double relative_error(const Tensor& actual, const Tensor& expected) {
  return ((actual.to(torch::kDouble) - expected).norm() / expected.norm()).item<double>();
}

// Error in bf16, with the default restarts.
double bf16_error(const Tensor& x, Method method, const Tensor& expected) {
  auto options = iteration("quintic", 5, method, torch::kBFloat16);
  options.restarts = {};
  return relative_error(orthogonalize(x, options), expected);
}

class OrthogonalizeTest : public testing::Test {
 protected:
  OrthogonalizeTest() { torch::manual_seed(0); }
};

TEST_F(OrthogonalizeTest, SingularValuesFollowTheScalarPolynomial) {
  for (const auto* name : {"quintic", "polar_express", "you_jiacheng"}) {
    for (const auto method : {Method::kNewtonSchulz, Method::kGram, Method::kAccurateGram}) {
      for (const double condition : {1.0, 10.0, 1e3, 1e6}) {
        const auto options = iteration(name, 5, method);
        const Tensor sigma = spectrum(24, condition);
        const Tensor x = with_spectrum(sigma, 24, 40);
        const Tensor unit = sigma / sigma.norm();  // the norm is divided out first
        Tensor expected = torch::empty_like(unit);
        for (int64_t i = 0; i < 24; ++i) {
          expected[i] = std::abs(scalar_iteration(unit[i].item<double>(), options.coefficients));
        }
        const Tensor actual = torch::linalg_svdvals(orthogonalize(x, options), std::nullopt);
        // The Gram form squares the condition number, and so amplifies rounding.
        EXPECT_TRUE(
            torch::allclose(
                actual, std::get<0>(expected.sort(-1, true)), 0, is_gram(method) ? 1e-9 : 1e-12))
            << name << " condition " << condition;
      }
    }
  }
}

TEST_F(OrthogonalizeTest, OneStepIsTheFormula) {
  const Tensor x = torch::randn({5, 9}, torch::kDouble);
  const Tensor y = x / x.norm();
  const Tensor a = y.mm(y.t());
  const Tensor expected = 3.4445 * y - 4.7750 * a.mm(y) + 2.0315 * a.mm(a).mm(y);
  EXPECT_TRUE(torch::allclose(orthogonalize(x, iteration("quintic", 1)), expected, 1e-12, 1e-14));
}

TEST_F(OrthogonalizeTest, AnyAspectRatioIsTheTransposedProblem) {
  for (const auto& [rows, cols] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 1}, {1, 7}, {7, 1}, {8, 8}, {4, 64}, {64, 4}, {13, 17}}) {
    const Tensor x = torch::randn({rows, cols}, torch::kDouble);
    for (const auto& options :
         {iteration("quintic"), iteration("quintic", 5, Method::kGram), exact()}) {
      const Tensor y = orthogonalize(x, options);
      EXPECT_EQ(y.sizes(), x.sizes());
      EXPECT_TRUE(torch::allclose(y, orthogonalize(x.t(), options).t(), 1e-9, 1e-11));
    }
  }
}

TEST_F(OrthogonalizeTest, BatchedEqualsOneByOne) {
  const Tensor blocks = torch::randn({2, 3, 10, 24});
  for (const auto method :
       {Method::kNewtonSchulz, Method::kGram, Method::kAccurateGram, Method::kExact}) {
    for (const auto precision : {torch::kFloat, torch::kDouble}) {
      const auto options = iteration("polar_express", 5, method, precision);
      const Tensor batched = orthogonalize(blocks, options);
      ASSERT_EQ(batched.sizes(), blocks.sizes());
      for (int64_t i = 0; i < 2; ++i) {
        for (int64_t j = 0; j < 3; ++j) {
          const double error = relative_error(
              batched[i][j], orthogonalize(blocks[i][j], options).to(torch::kDouble));
          EXPECT_LT(error, precision == torch::kFloat ? 1e-4 : 1e-12);
        }
      }
    }
  }
}

TEST_F(OrthogonalizeTest, ExactIsThePolarFactor) {
  const Tensor g = torch::randn({12, 30}, torch::kDouble);
  const Tensor p = orthogonalize(g, exact());
  const double nuclear = torch::linalg_svdvals(g, std::nullopt).sum().item<double>();
  EXPECT_NEAR((g * p).sum().item<double>(), nuclear, 1e-10 * nuclear);  // ⟨G, P(G)⟩ = ‖G‖_*
  EXPECT_NEAR(p.square().sum().item<double>(), 12, 1e-10);              // ‖P(G)‖_F² = rank
  EXPECT_TRUE(torch::allclose(p.mm(p.t()), torch::eye(12, torch::kDouble), 0, 1e-12));
}

TEST_F(OrthogonalizeTest, ExactCountsOnlyTheRankOfADeficientBlock) {
  for (const int64_t rank : {0, 1, 3, 7}) {
    const Tensor g =
        torch::randn({10, rank}, torch::kDouble).mm(torch::randn({rank, 16}, torch::kDouble));
    const Tensor p = orthogonalize(g, exact());
    EXPECT_NEAR(p.square().sum().item<double>(), rank, 1e-9);
    const double nuclear = torch::linalg_svdvals(g, std::nullopt).sum().item<double>();
    EXPECT_NEAR((g * p).sum().item<double>(), nuclear, 1e-9 * (1 + nuclear));
  }
}

TEST_F(OrthogonalizeTest, ExactRankCutOffIsAnOption) {
  const Tensor g = with_spectrum(torch::tensor({1.0, 0.5, 1e-3, 1e-5}, torch::kDouble), 4, 9);
  auto options = exact();
  EXPECT_NEAR(orthogonalize(g, options).square().sum().item<double>(), 4, 1e-9);
  options.rank_tolerance = 1e-4;
  EXPECT_NEAR(orthogonalize(g, options).square().sum().item<double>(), 3, 1e-9);
  options.rank_tolerance = 0.1;
  EXPECT_NEAR(orthogonalize(g, options).square().sum().item<double>(), 2, 1e-9);
}

TEST_F(OrthogonalizeTest, ExactSeesTheRankThroughTheRoundingOfItsData) {
  const Tensor g = torch::randn({64, 3}, torch::kDouble).mm(torch::randn({3, 128}, torch::kDouble));
  for (const auto data : {torch::kBFloat16, torch::kFloat, torch::kDouble}) {
    for (const auto precision : {torch::kBFloat16, torch::kFloat, torch::kDouble}) {
      const Tensor p =
          orthogonalize(g.to(data), {.method = Method::kExact, .precision = precision});
      EXPECT_NEAR(p.to(torch::kDouble).square().sum().item<double>(), 3, 0.05)
          << data << " " << precision;
    }
  }
}

TEST_F(OrthogonalizeTest, TheConvergingTailReachesTheExactPolarFactor) {
  for (const auto* name : {"quintic", "polar_express", "you_jiacheng"}) {
    for (const double condition : {1.0, 1e2, 1e4}) {
      const Tensor x = with_spectrum(spectrum(16, condition), 16, 20);
      auto options = iteration(name);
      options.coefficients = coefficient_list(name, 9, 8, Method::kNewtonSchulz);
      EXPECT_LT(relative_error(orthogonalize(x, options), orthogonalize(x, exact())), 1e-10)
          << name << " condition " << condition;
    }
  }
}

TEST_F(OrthogonalizeTest, NewtonSchulzIsCloseToSvd) {
  // Five quintic steps leave singular values of a well-conditioned block in about [0.68, 1.14].
  const Tensor x = torch::randn({64, 256}, torch::kDouble);
  const Tensor sigma = torch::linalg_svdvals(orthogonalize(x, iteration("quintic")), std::nullopt);
  EXPECT_GT(sigma.min().item<double>(), 0.65);
  EXPECT_LT(sigma.max().item<double>(), 1.21);
}

// Bounds on the relative Frobenius error of Gram against standard, with the same polynomial.
TEST_F(OrthogonalizeTest, GramEqualsStandardWithinItsBound) {
  struct Bound {
    c10::ScalarType precision;
    double gaussian;
    double condition_1e3;
  };
  const Tensor gaussian = torch::randn({48, 192}, torch::kDouble);
  const Tensor ill = with_spectrum(spectrum(48, 1e3), 48, 192);
  for (const auto& bound :
       {Bound{torch::kDouble, 1e-13, 1e-11}, Bound{torch::kFloat, 1e-5, 1e-3},
        Bound{torch::kBFloat16, 0.08, 0.25}}) {
    for (const auto* name : {"quintic", "polar_express"}) {
      const auto gram = iteration(name, 5, Method::kGram, bound.precision);
      auto standard = gram;  // same coefficients, so the same safety margin
      standard.method = Method::kNewtonSchulz;
      standard.restarts = {};
      standard.precision = torch::kDouble;
      EXPECT_LT(
          relative_error(orthogonalize(gaussian, gram), orthogonalize(gaussian, standard)),
          bound.gaussian)
          << name << " " << bound.precision;
      EXPECT_LT(
          relative_error(orthogonalize(ill, gram), orthogonalize(ill, standard)),
          bound.condition_1e3)
          << name << " " << bound.precision;
    }
  }
}

TEST_F(OrthogonalizeTest, AccurateGramIsNoLessAccurateThanPlainBf16) {
  for (const auto& [rows, cols] :
       std::vector<std::pair<int64_t, int64_t>>{{64, 256}, {256, 64}, {192, 192}, {96, 384}}) {
    const int64_t k = std::min(rows, cols);
    for (const auto& x :
         {torch::randn({rows, cols}, torch::kDouble), with_spectrum(spectrum(k, 1e3), rows, cols),
          with_spectrum(spectrum(k, 1e6), rows, cols)}) {
      const Tensor expected = orthogonalize(x, iteration("quintic"));
      EXPECT_LE(
          bf16_error(x, Method::kAccurateGram, expected),
          bf16_error(x, Method::kNewtonSchulz, expected))
          << rows << "x" << cols;
      EXPECT_LT(
          bf16_error(x, Method::kGram, expected),
          3 * bf16_error(x, Method::kNewtonSchulz, expected))
          << rows << "x" << cols;
    }
  }
}

TEST_F(OrthogonalizeTest, GramStaysAccurateWhereOneDirectionHasMostOfTheNorm) {
  // As in the heads of a real momentum. With only one restart, errors here reach 90.
  for (const auto& [rows, cols] :
       std::vector<std::pair<int64_t, int64_t>>{{16, 192}, {192, 16}, {32, 256}, {64, 768}}) {
    for (const double share : {0.3, 0.6, 0.8, 0.95, 0.99}) {
      for (int64_t repeat = 0; repeat < 4; ++repeat) {
        const auto unit = [](const Tensor& x) { return x / x.norm(); };
        const Tensor rest = unit(torch::randn({rows, cols}, torch::kDouble));
        const Tensor direction = unit(
            torch::outer(
                torch::randn({rows}, torch::kDouble), torch::randn({cols}, torch::kDouble)));
        const Tensor x = std::sqrt(share) * direction + std::sqrt(1 - share) * rest;
        const Tensor expected = orthogonalize(x, iteration("quintic"));
        EXPECT_LT(bf16_error(x, Method::kGram, expected), 0.08) << rows << " " << share;
        EXPECT_LT(
            bf16_error(x, Method::kAccurateGram, expected),
            1.3 * bf16_error(x, Method::kNewtonSchulz, expected))
            << rows << " " << share;
      }
    }
  }
}

TEST_F(OrthogonalizeTest, GramInFp32IsCloseToTheFormulaOnAnyBlock) {
  const auto unit = [](const Tensor& x) { return x / x.norm(); };
  for (const auto& [rows, cols] :
       std::vector<std::pair<int64_t, int64_t>>{{16, 192}, {192, 16}, {96, 96}, {100, 230}}) {
    const int64_t k = std::min(rows, cols);
    const Tensor gaussian = torch::randn({rows, cols}, torch::kDouble);
    const Tensor direction =
        torch::outer(torch::randn({rows}, torch::kDouble), torch::randn({cols}, torch::kDouble));
    for (const auto* name : {"quintic", "polar_express", "you_jiacheng"}) {
      for (const int64_t steps : {1, 5, 9}) {
        auto options = iteration(name, steps, Method::kGram, torch::kFloat);
        options.restarts = {};  // the default ones
        auto formula = options;
        formula.method = Method::kNewtonSchulz;
        formula.precision = torch::kDouble;
        const auto error = [&](const Tensor& x) {
          return relative_error(orthogonalize(x, options), orthogonalize(x, formula));
        };
        EXPECT_LT(error(gaussian), 1e-4) << name << " " << rows << "x" << cols;
        EXPECT_LT(error(with_spectrum(spectrum(k, 1e6), rows, cols)), 2e-3) << name << steps;
        for (const double share : {0.6, 0.99}) {
          const Tensor x =
              std::sqrt(share) * unit(direction) + std::sqrt(1 - share) * unit(gaussian);
          EXPECT_LT(error(x), 3e-4) << name << " " << steps << " " << share;
        }
      }
    }
  }
}

TEST_F(OrthogonalizeTest, GramRestartsBeforeItsFactorIsIllConditioned) {
  using Steps = std::vector<int64_t>;
  const auto restarts = [](const char* name, int64_t steps, double limit, int64_t tail = 0) {
    return gram_restarts(coefficient_list(name, steps, tail, Method::kGram), limit);
  };
  EXPECT_EQ(restarts("quintic", 5, kLooseCondition), (Steps{3}));
  EXPECT_EQ(restarts("quintic", 5, kTightCondition), (Steps{2, 4}));
  EXPECT_EQ(restarts("quintic", 7, kLooseCondition), (Steps{3, 5}));
  EXPECT_EQ(restarts("polar_express", 5, kLooseCondition), (Steps{1, 2, 3}));
  EXPECT_TRUE(restarts("quintic", 1, kTightCondition).empty());
  EXPECT_EQ(restarts("quintic", 5, 1e9).size(), 1);  // no phase is longer than three steps
  EXPECT_EQ(restarts("quintic", 5, 1).size(), 4);    // cannot be met: after every step
  EXPECT_GE(restarts("quintic", 5, kLooseCondition, 20).size(), 3);
}

// Blocks like momentum: a few directions plus noise.
TEST_F(OrthogonalizeTest, NoNumberOfStepsDivergesOnBlocksOfLowRank) {
  for (const auto* name : {"quintic", "polar_express", "you_jiacheng"}) {
    for (const int64_t steps : {1, 3, 5, 7, 10, 12}) {
      for (const int64_t tail : {0, 2, 10}) {
        // Polar Express cut short leaves singular values above √3, from which a tail diverges.
        if (std::string(name) == "polar_express" && steps < 5) continue;
        for (const int64_t rank : {1, 4}) {
          const Tensor noise = torch::randn({96, 160}) * (rank == 1 ? 1e-2 : 1e-4);
          const Tensor x = torch::randn({96, rank}).mm(torch::randn({rank, 160})) + noise;
          for (const auto method : {Method::kAuto, Method::kGram, Method::kAccurateGram}) {
            OrthogonalizeOptions options;
            options.method = method;
            options.coefficients = coefficient_list(name, steps, tail, method);
            const Tensor y = orthogonalize(x, options).to(torch::kFloat);
            const double largest = torch::linalg_svdvals(y, std::nullopt).max().item<double>();
            EXPECT_LT(largest, 1.35) << name << " " << steps << "+" << tail << " rank " << rank
                                     << " method " << static_cast<int>(method);
          }
        }
      }
    }
  }
}

TEST_F(OrthogonalizeTest, GramRestartsDoNotChangeTheResult) {
  const Tensor x = torch::randn({12, 30}, torch::kDouble);
  auto options = iteration("quintic", 5, Method::kGram);
  const Tensor expected = orthogonalize(x, iteration("quintic"));
  for (const auto& restarts : std::vector<std::vector<int64_t>>{{}, {1}, {2}, {4}, {1, 2, 3, 4}}) {
    options.restarts = restarts;
    EXPECT_LT(relative_error(orthogonalize(x, options), expected), 1e-9);
  }
}

TEST_F(OrthogonalizeTest, WorkingPrecisionIsAnOption) {
  const Tensor x = torch::randn({32, 64}, torch::kDouble);
  const Tensor expected = orthogonalize(x, iteration("quintic"));
  const auto error = [&](c10::ScalarType precision) {
    const Tensor y = orthogonalize(x, iteration("quintic", 5, Method::kNewtonSchulz, precision));
    EXPECT_EQ(y.scalar_type(), precision);
    return relative_error(y, expected);
  };
  EXPECT_LT(error(torch::kFloat), 1e-5);
  EXPECT_LT(error(torch::kBFloat16), 0.05);
  EXPECT_GT(error(torch::kBFloat16), 1e-4);
}

TEST_F(OrthogonalizeTest, ItNeverWritesIntoItsInput) {
  for (const auto dtype : {torch::kBFloat16, torch::kFloat, torch::kDouble}) {
    for (const auto method :
         {Method::kNewtonSchulz, Method::kGram, Method::kAccurateGram, Method::kExact}) {
      for (const auto precision : {torch::kBFloat16, torch::kFloat, torch::kDouble}) {
        const Tensor x = torch::randn({2, 6, 10}).to(dtype);
        const Tensor before = x.clone();
        const Tensor y = orthogonalize(x, iteration("quintic", 5, method, precision));
        EXPECT_TRUE(torch::equal(x, before));
        EXPECT_FALSE(y.is_alias_of(x));
      }
    }
  }
}

TEST_F(OrthogonalizeTest, ZeroInZeroOutAndNoOtherBlockNotices) {
  const Tensor blocks = torch::randn({3, 6, 10});
  const Tensor with_zero = blocks.clone();
  with_zero[1].zero_();
  for (const auto method :
       {Method::kNewtonSchulz, Method::kGram, Method::kAccurateGram, Method::kExact}) {
    for (const bool relative : {true, false}) {
      auto options = iteration("quintic", 5, method, torch::kFloat);
      options.relative_eps = relative;
      options.eps = 1e-7;
      const Tensor y = orthogonalize(with_zero, options);
      EXPECT_EQ(y[1].abs().max().item<float>(), 0);
      const Tensor others = orthogonalize(blocks, options);
      EXPECT_TRUE(torch::equal(y[0], others[0]));
      EXPECT_TRUE(torch::equal(y[2], others[2]));
    }
  }
}

TEST_F(OrthogonalizeTest, NanInNanOutAndNoOtherBlockNotices) {
  const Tensor blocks = torch::randn({3, 6, 10});
  for (const float poison :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    const Tensor poisoned = blocks.clone();
    poisoned[1][2][3] = poison;
    for (const auto method :
         {Method::kNewtonSchulz, Method::kGram, Method::kAccurateGram, Method::kExact}) {
      for (const auto precision : {torch::kBFloat16, torch::kFloat}) {
        const auto options = iteration("quintic", 5, method, precision);
        const Tensor y = orthogonalize(poisoned, options);
        EXPECT_TRUE(y[1].isnan().all().item<bool>());
        const Tensor others = orthogonalize(blocks, options);
        EXPECT_TRUE(torch::equal(y[0], others[0]));
        EXPECT_TRUE(torch::equal(y[2], others[2]));
      }
    }
  }
}

TEST_F(OrthogonalizeTest, ScaleInvariantDownToNormsOf1e30) {
  const Tensor unit = torch::randn({6, 10}) / 8;
  for (const auto method :
       {Method::kNewtonSchulz, Method::kGram, Method::kAccurateGram, Method::kExact}) {
    auto options = iteration("quintic", 5, method, torch::kFloat);
    options.eps = OrthogonalizeOptions().eps;
    const Tensor expected = orthogonalize(unit, options).to(torch::kDouble);
    for (const double scale : {1e-36, 1e-30, 1e-20, 1e-10, 1e10, 1e30}) {
      EXPECT_LT(relative_error(orthogonalize(unit * scale, options), expected), 1e-5) << scale;
    }
  }
}

TEST_F(OrthogonalizeTest, AbsoluteEpsIsTheScriptsFormula) {
  const Tensor x = torch::randn({6, 10}, torch::kDouble) * 1e-7;
  auto options = iteration("quintic", 1);
  options.relative_eps = false;
  options.eps = 1e-7;
  const Tensor y = x / (x.norm() + 1e-7);
  const Tensor a = y.mm(y.t());
  const Tensor expected = 3.4445 * y - 4.7750 * a.mm(y) + 2.0315 * a.mm(a).mm(y);
  EXPECT_LT(relative_error(orthogonalize(x, options), expected), 1e-12);
}

TEST_F(OrthogonalizeTest, CoefficientListsAreCutRepeatedAndExtended) {
  EXPECT_EQ(
      coefficient_list("quintic", 2, 0, Method::kNewtonSchulz),
      (std::vector<Coefficients>{{3.4445, -4.7750, 2.0315}, {3.4445, -4.7750, 2.0315}}));
  const auto you = coefficient_list("you_jiacheng", 7, 1, Method::kNewtonSchulz);
  ASSERT_EQ(you.size(), 8U);
  EXPECT_EQ(coefficient_list("you", 7, 1, Method::kNewtonSchulz), you);  // the old name
  EXPECT_EQ(you[0], (Coefficients{4.0848, -6.8946, 2.9270}));
  EXPECT_EQ(you[6], you[4]);
  EXPECT_EQ(you[7], (Coefficients{2, -1.5, 0.5}));
  EXPECT_DOUBLE_EQ(
      coefficient_list("polar_express", 1, 0, Method::kNewtonSchulz)[0].a, 8.28721201814563 / 1.01);
  EXPECT_DOUBLE_EQ(
      coefficient_list("polar_express", 1, 0, Method::kGram)[0].a, 8.28721201814563 / 1.05);
  const auto polar_express = coefficient_list("polar_express", 10, 0, Method::kNewtonSchulz);
  EXPECT_DOUBLE_EQ(polar_express[6].a, 1.8750014808534479 / 1.01);
  for (const size_t i : {7, 8, 9}) {  // they converge and need no margin
    EXPECT_EQ(polar_express[i], (Coefficients{1.875, -1.25, 0.375}));
  }
}

TEST_F(OrthogonalizeTest, MorePolarExpressStepsAreNeverWorse) {
  for (const auto& x :
       {torch::randn({48, 192}, torch::kDouble), with_spectrum(spectrum(48, 1e3), 48, 192)}) {
    const Tensor polar = orthogonalize(x, exact());
    for (const auto method : {Method::kNewtonSchulz, Method::kGram, Method::kAccurateGram}) {
      for (const auto precision : {torch::kDouble, torch::kFloat}) {
        double before = 1;
        for (int64_t steps = 4; steps <= 12; ++steps) {
          auto options = iteration("polar_express", steps, method, precision);
          options.restarts = {};
          const double error = relative_error(orthogonalize(x, options), polar);
          EXPECT_LT(error, before + 1e-4) << steps << " steps, " << method_name(method);
          before = error;
        }
        EXPECT_LT(before, precision == torch::kDouble ? 1e-9 : 1e-3) << method_name(method);
      }
    }
  }
}

// A Polar Express list with a margin of 2% of its own, as other programs use it.
const std::vector<Coefficients> kOwnList = {
    {8.156554524902461, -22.48329292557795, 15.878769915207462},
    {4.042929935166739, -2.808917465908714, 0.5000178451051316},
    {3.8916678022926607, -2.772484153217685, 0.5060648178503393},
    {3.285753657755655, -2.3681294933425376, 0.46449024233003106},
    {2.3465413258596377, -1.7097828382687081, 0.42323551169305323}};

// With the margin, a Gram method in bf16 rounds hardly more than the plain iteration of the same list.
TEST_F(OrthogonalizeTest, OwnListsGetTheMarginThatGramNeeds) {
  const auto with_margin = with_gram_margin(kOwnList);
  const Tensor one_direction =
      torch::randn({64, 1}, torch::kDouble).mm(torch::randn({1, 256}, torch::kDouble));
  for (const auto& x :
       {torch::randn({64, 768}, torch::kDouble), with_spectrum(spectrum(64, 30), 64, 256),
        one_direction + 0.1 * torch::randn({64, 256}, torch::kDouble)}) {
    const auto error = [&](Method method, Engine engine) {
      OrthogonalizeOptions options = {
          .method = Method::kNewtonSchulz,
          .coefficients = with_margin,
          .precision = torch::kDouble};
      const Tensor expected = orthogonalize(x, options);
      options.method = method;
      options.engine = engine;
      options.precision = torch::kBFloat16;
      if (is_gram(method)) options.coefficients = kOwnList;
      return relative_error(orthogonalize(x, options), expected);
    };
    const double plain = error(Method::kNewtonSchulz, Engine::kAuto);
    for (const auto method : {Method::kGram, Method::kAccurateGram}) {
      EXPECT_LT(error(method, Engine::kPortable), plain + 0.03) << method_name(method);
      if (has_bf16(torch::kCPU)) {
        EXPECT_LT(error(method, Engine::kAuto), plain + 0.03) << method_name(method);
      }
    }
  }
}

TEST_F(OrthogonalizeTest, TheGramMarginIsOnlyAddedWhereItIsNeededAndOnlyOnce) {
  for (int64_t steps = 1; steps <= 12; ++steps) {
    for (const int64_t tail : {0, 1, 4}) {
      const auto quintic = coefficient_list("quintic", steps, tail, Method::kGram);
      EXPECT_EQ(with_gram_margin(quintic), quintic) << steps << "+" << tail;
      for (const auto* name : {"polar_express", "you_jiacheng"}) {
        const auto once =
            with_gram_margin(coefficient_list(name, steps, tail, Method::kNewtonSchulz));
        EXPECT_EQ(with_gram_margin(once), once) << name << " " << steps << "+" << tail;
      }
    }
  }
  const double margin = kOwnList[0].a / with_gram_margin(kOwnList)[0].a;
  EXPECT_GT(margin, 1.02);
  EXPECT_LT(margin, 1.04);
  // fp32 rounds too little for that.
  const OrthogonalizeOptions in_fp32 = {
      .method = Method::kGram, .coefficients = kOwnList, .precision = torch::kFloat};
  EXPECT_EQ(resolved(in_fp32, torch::kCPU).coefficients, kOwnList);
}

TEST_F(OrthogonalizeTest, AutoThatFallsBackIsNewtonSchulz) {
  const Tensor x = torch::randn({24, 40});
  for (const auto* name : {"polar_express", "you_jiacheng"}) {
    OrthogonalizeOptions plain;
    plain.coefficients = coefficient_list(name, 5, 0, Method::kNewtonSchulz);
    plain.gram_coefficients = coefficient_list(name, 5, 0, Method::kGram);
    auto fallback = plain;
    fallback.method = Method::kAuto;
    fallback.engine = Engine::kPortable;
    EXPECT_EQ(resolved(fallback, torch::kCPU).coefficients, plain.coefficients);
    EXPECT_TRUE(torch::equal(orthogonalize(x, fallback), orthogonalize(x, plain)));
  }
}

TEST_F(OrthogonalizeTest, EmptyInputGivesEmptyOutput) {
  EXPECT_EQ(orthogonalize(torch::empty({0, 4, 6}), {}).sizes(), (std::vector<int64_t>{0, 4, 6}));
  EXPECT_EQ(orthogonalize(torch::empty({4, 0}), {}).sizes(), (std::vector<int64_t>{4, 0}));
}

TEST_F(OrthogonalizeTest, BadUseIsRefusedWithTheValue) {
  const Tensor x = torch::randn({4, 6});
  EXPECT_ERROR_SAYS(
      orthogonalize(torch::randn({4}), {}), "needs matrices, not a tensor of shape [4]");
  EXPECT_ERROR_SAYS(orthogonalize(torch::ones({4, 6}, torch::kLong), {}), "not Long");
  EXPECT_ERROR_SAYS(
      orthogonalize(x, {.precision = torch::kHalf}),
      "precision should be auto, bfloat16, float32 or float64");
  EXPECT_ERROR_SAYS(orthogonalize(x, {.eps = -1}), "eps should be 0 or more, not -1");
  EXPECT_ERROR_SAYS(orthogonalize(x, {.coefficients = {}}), "at least one step");
  EXPECT_ERROR_SAYS(
      orthogonalize(x, {.method = Method::kGram, .restarts = {5}}),
      "between 1 and 4 for 5 steps, but one is 5");
  EXPECT_ERROR_SAYS(
      orthogonalize(x, {.rank_tolerance = 2}), "rank_tolerance should be in [0, 1), not 2");
  EXPECT_ERROR_SAYS(
      coefficient_list("cubic", 5, 0, Method::kNewtonSchulz),
      "unknown coefficients 'cubic': use quintic, polar_express, you_jiacheng");
  EXPECT_ERROR_SAYS(coefficient_list("quintic", -1, 0, Method::kNewtonSchulz), "not -1 and 0");
  EXPECT_ERROR_SAYS(
      parse_method("svd"),
      "unknown method 'svd': use auto, newton_schulz, gram, accurate_gram or exact");
  EXPECT_ERROR_SAYS(
      parse_precision("float16"),
      "unknown precision 'float16': use auto, bfloat16, float32 or float64");
}

}  // namespace
}  // namespace group_muon
