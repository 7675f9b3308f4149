// Balanced rows and spectral norms, against what they should be by definition.

#include <torch/torch.h>

#include <limits>

#include "group_muon/balance.h"
#include "reference.h"
#include "testing.h"

namespace group_muon {
namespace {

using torch::Tensor;

Tensor exact_norms(const Tensor& matrices) {
  return std::get<0>(torch::linalg_svdvals(matrices.to(torch::kDouble)).max(-1));
}

TEST(Balance, EveryOutputNeuronHasNormOneOrZero) {
  torch::manual_seed(1);
  for (const bool transposed : {false, true}) {
    for (const double size : {1.0, 1e-35, 1e30}) {
      Tensor blocks = torch::randn({2, 3, 5, 7}) * torch::rand({2, 3, 5, 7}).pow(4) * size;
      const int64_t dim = transposed ? 2 : 3;
      blocks.select(5 - dim, 1).zero_();  // one neuron of each block
      const Tensor norms = blocks.to(torch::kDouble).norm(2, dim, true);
      const Tensor expected =
          torch::where(norms == 0, torch::zeros_like(norms), blocks.to(torch::kDouble) / norms);
      const Tensor balanced = with_balanced_rows(blocks, transposed);
      EXPECT_TRUE(torch::allclose(balanced.to(torch::kDouble), expected, 1e-5, 1e-7)) << size;
    }
  }
}

TEST(Balance, NansStayInTheirRow) {
  Tensor blocks = torch::ones({1, 1, 3, 4});
  blocks[0][0][1][2] = std::numeric_limits<float>::quiet_NaN();
  const Tensor balanced = with_balanced_rows(blocks, false)[0][0];
  EXPECT_TRUE(balanced[1].isnan().all().item<bool>());
  EXPECT_TRUE(torch::allclose(balanced[0], torch::full({4}, 0.5)));
}

TEST(SpectralNorms, AreWithinThreePercentOfTheExactOnesForUpdates) {
  torch::manual_seed(2);
  double worst = 0, squares = 0, count = 0;
  const auto spectrum = [](int64_t n, int kind) {
    const Tensor i = torch::arange(1, n + 1, torch::kFloat);
    return kind == 0 ? torch::ones({n}) : kind == 1 ? 1 / i : torch::exp(-i / 20) + 1e-4;
  };
  for (const int64_t n : {96, 128, 384}) {
    for (int kind = 0; kind < 3; ++kind) {
      const auto [u, s, v] = torch::linalg_svd(torch::randn({n, n}));
      const Tensor x =
          kind == 0 ? torch::randn({n, n}) : u.mm(torch::diag(spectrum(n, kind))).mm(v);
      for (const int64_t heads : {1, 2, 4}) {
        std::vector<Tensor> blocks;
        for (const auto& block : x.split(heads * n / 8)) {
          blocks.push_back(reference::newton_schulz(block, torch::kFloat));
        }
        for (const Tensor& matrices : {torch::stack(blocks), torch::cat(blocks).unsqueeze(0)}) {
          const Tensor error = spectral_norms(matrices) / exact_norms(matrices) - 1;
          EXPECT_LT(error.max().item<double>(), 1e-5) << "an estimate from below";
          worst = std::max(worst, -error.min().item<double>());
          squares += error.square().sum().item<double>();
          count += static_cast<double>(error.numel());
        }
      }
    }
  }
  RecordProperty("worst", std::to_string(worst));
  RecordProperty("rms", std::to_string(std::sqrt(squares / count)));
  EXPECT_LT(worst, 0.03);
  EXPECT_LT(std::sqrt(squares / count), 0.01);
}

TEST(SpectralNorms, AreExactForSmallMatricesAndDoNotDependOnScaleOrCompany) {
  torch::manual_seed(3);
  for (const auto& [rows, cols] : {std::pair{1, 1}, {1, 9}, {9, 1}, {3, 20}, {20, 3}, {8, 8}}) {
    const Tensor x = torch::randn({4, rows, cols});
    const Tensor norms = spectral_norms(x);
    EXPECT_TRUE(torch::allclose(norms.to(torch::kDouble), exact_norms(x), 1e-4)) << rows << cols;
    EXPECT_TRUE(torch::allclose(spectral_norms(x * 1024), norms * 1024));
    EXPECT_TRUE(torch::equal(spectral_norms(x), norms)) << "no state";
  }
  Tensor x = torch::zeros({3, 4, 5});
  x[1].fill_(1);
  x[2][0][0] = std::numeric_limits<float>::infinity();
  const Tensor norms = spectral_norms(x);
  EXPECT_EQ(norms[0].item<float>(), 0);
  EXPECT_NEAR(norms[1].item<float>(), std::sqrt(20.0), 1e-4);
  EXPECT_TRUE(norms[2].isnan().item<bool>());
}

TEST(SpectralNorms, AreMatchedOnlyDownwardsAndSingleBlocksAreLeftAlone) {
  torch::manual_seed(4);
  for (const int64_t axis : {0, 1}) {
    for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kDouble}) {
      const Tensor one = torch::randn({2, 1, 4, 6}).to(dtype), copy = one.clone();
      match_spectral_norm(one, axis);
      EXPECT_TRUE(torch::equal(one, copy));
      const Tensor zeros = torch::zeros({1, 2, 4, 6}, dtype);
      match_spectral_norm(zeros, axis);
      EXPECT_TRUE(torch::equal(zeros, torch::zeros_like(zeros)));
      // Blocks that are each other's copies: the whole is √3 times as large.
      const Tensor same = torch::randn({1, 1, 4, 6}).to(dtype).expand({1, 3, 4, 6}).clone();
      const Tensor before = same.clone();
      match_spectral_norm(same, axis);
      EXPECT_TRUE(
          torch::allclose(
              same.to(torch::kDouble), before.to(torch::kDouble) / std::sqrt(3.0),
              dtype == torch::kBFloat16 ? 0.01 : 1e-3));
      // Orthogonal blocks: the whole is no larger than the largest.
      const Tensor apart = torch::zeros({1, 2, 4, 4}, dtype);
      for (int64_t i = 0; i < 2; ++i) {
        apart[0][i][2 * i][2 * i] = 1;
        apart[0][i][2 * i + 1][2 * i + 1] = 1;
      }
      const Tensor as_before = apart.clone();
      match_spectral_norm(apart, axis);
      EXPECT_TRUE(torch::allclose(apart, as_before, 0, 1e-2));
    }
  }
}

}  // namespace
}  // namespace group_muon
