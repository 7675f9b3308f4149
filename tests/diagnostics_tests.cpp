// Gain, cost, ranks and bounds against closed forms, and the estimate against singular values.

#include <torch/torch.h>

#include <cmath>

#include "group_muon/diagnostics.h"
#include "group_muon/step.h"
#include "testing.h"

namespace group_muon {
namespace {

using torch::Tensor;

constexpr size_t kMachine = kRanks - 1;  // index of the rank at machine precision

class DiagnosticsTest : public ::testing::Test {
 protected:
  void SetUp() override { torch::manual_seed(7); }
};

Tensor randn(at::IntArrayRef sizes) { return torch::randn(sizes, torch::kDouble); }

Tensor orthonormal_rows(int64_t rows, int64_t cols) {
  return std::get<0>(torch::linalg_qr(randn({cols, rows}))).t();
}

// Ideal Muon: exact polar factors in fp64, and no scale on the learning rate.
StepOptions ideal() {
  StepOptions options;
  options.orthogonalize.method = Method::kExact;
  options.orthogonalize.precision = torch::kDouble;
  options.scale.base = ScaleRule::kNaive;
  options.scale.transfer = ScaleRule::kNaive;
  return options;
}

Weight weight_of(const Tensor& gradient, const Layout& layout) {
  Weight weight;
  weight.value = torch::zeros_like(gradient);
  weight.grad = gradient;
  weight.momentum = torch::zeros_like(gradient);
  weight.layout = layout;
  weight.name = "w";
  weight.partition = "w";
  return weight;
}

// Measures all rows, with the gradient itself as the direction.
Whitening whole(
    const Tensor& gradient, const Layout& layout, const StepOptions& options = ideal(),
    Accuracy accuracy = Accuracy::kExact) {
  return measure(gradient, weight_of(gradient, layout), plain(), options, accuracy)[0];
}

Layout heads_of(int64_t heads, int64_t rows, const char* grouping) {
  return separate(heads, rows, parse_schedule(grouping));
}

// β/2·‖W - A‖², which is β-smooth. Its gradient is β(W - A).
double quadratic(const Tensor& w, const Tensor& a, double beta) {
  return beta / 2 * (w - a).square().sum().item<double>();
}

TEST_F(DiagnosticsTest, AlignedLowRankGivesTheClosedForms) {
  constexpr int64_t kRows = 3, kCols = 20;
  for (int64_t k = 1; k <= 12; ++k) {
    const Tensor v = orthonormal_rows(1, kCols);
    const Tensor a = randn({k}).abs() + 0.1;
    std::vector<Tensor> blocks;
    for (int64_t i = 0; i < k; ++i) blocks.push_back(a[i] * orthonormal_rows(1, kRows).t().mm(v));
    const Tensor gradient = torch::cat(blocks);
    const auto grouped = whole(gradient, heads_of(k, kRows, "1"));
    const auto full = whole(gradient, plain());
    const double lr = 0.03, beta = 5;
    const auto comparison = compare(grouped, full, lr);
    const double gain = (a.sum() - a.norm()).item<double>();
    EXPECT_NEAR(*comparison.gain, gain, 1e-12) << k;
    EXPECT_NEAR(comparison.first_order_gain, gain, 1e-12) << k;
    for (const double cost : *comparison.ideal_cost) EXPECT_EQ(cost, static_cast<double>(k - 1));
    EXPECT_NEAR(comparison.norm_cost, static_cast<double>(k - 1), 1e-12) << k;
    const double difference =
        guaranteed_decrease(grouped, lr, beta) - guaranteed_decrease(full, lr, beta);
    EXPECT_NEAR(difference / lr, gain - static_cast<double>(k - 1) * beta * lr / 2, 1e-12) << k;
    if (k > 1) {
      EXPECT_EQ(comparison.break_even.pays, BreakEven::Pays::kBelow);
      EXPECT_NEAR(comparison.break_even.beta, 2 * gain / (lr * static_cast<double>(k - 1)), 1e-8);
    }
    // Equal strengths: the gain is a(k - √k).
    const Tensor equal = torch::cat(blocks) / torch::repeat_interleave(a, kRows).unsqueeze(1);
    const auto same = compare(whole(equal, heads_of(k, kRows, "1")), whole(equal, plain()), lr);
    EXPECT_NEAR(*same.gain, static_cast<double>(k) - std::sqrt(static_cast<double>(k)), 1e-12);
  }
}

TEST_F(DiagnosticsTest, OrthogonalRowSpacesGainNothing) {
  const Tensor basis = orthonormal_rows(12, 40);
  std::vector<Tensor> blocks;
  for (int64_t i = 0; i < 4; ++i) blocks.push_back(randn({3, 3}).mm(basis.narrow(0, 3 * i, 3)));
  const Tensor gradient = torch::cat(blocks);
  const auto comparison =
      compare(whole(gradient, heads_of(4, 3, "1")), whole(gradient, plain()), 0.1);
  EXPECT_NEAR(*comparison.gain, 0, 1e-11);
  EXPECT_NEAR(comparison.norm_cost, 0, 1e-11);
}

TEST_F(DiagnosticsTest, FullRowRankCostsNothingIdeally) {
  const Tensor gradient = randn({24, 40});
  const auto grouped = whole(gradient, heads_of(12, 2, "3:interval"));
  const auto comparison = compare(grouped, whole(gradient, plain()), 0.1);
  EXPECT_EQ((*comparison.ideal_cost)[kMachine], 0);
  EXPECT_NEAR(comparison.norm_cost, 0, 1e-11);
  EXPECT_GT(*comparison.gain, 0.1);
  EXPECT_EQ(grouped.of_blocks->ranks[kMachine], 24);
  EXPECT_EQ(grouped.blocks, 4);
}

TEST_F(DiagnosticsTest, APackedMatrixTallerThanWideCostsRank) {
  // A 3d × d matrix has rank d; three d × d matrices have rank 3d in total.
  const Tensor gradient = randn({36, 12});
  const Layout three_way = packed_qkv({.heads = 4, .head_dim = 3});
  const auto parts =
      measure(gradient, weight_of(gradient, plain()), three_way, ideal(), Accuracy::kExact);
  const auto grouped =
      measure(gradient, weight_of(gradient, three_way), three_way, ideal(), Accuracy::kExact);
  EXPECT_EQ((*compare(grouped[0], parts[0], 1).ideal_cost)[kMachine], 24);
  EXPECT_NEAR(compare(grouped[0], parts[0], 1).norm_cost, 24, 1e-10);
  ASSERT_EQ(parts.size(), 4);
  EXPECT_EQ(parts[1].segment, "q");
  EXPECT_FALSE(parts[1].of_blocks) << "a packed block has no singular values for Q alone";
  EXPECT_FALSE(compare(grouped[1], parts[1], 1).gain);
  double first_order = 0, squares = 0;
  for (size_t i = 1; i < parts.size(); ++i) {
    first_order += parts[i].first_order;
    squares += parts[i].squared_norm;
  }
  EXPECT_NEAR(first_order, parts[0].first_order, 1e-10);
  EXPECT_NEAR(squares, 12, 1e-10);
}

TEST_F(DiagnosticsTest, ZeroAndRankDeficientBlocks) {
  Tensor gradient = randn({12, 20});
  gradient.narrow(0, 3, 3).zero_();                                  // second head: zero
  gradient.narrow(0, 6, 3).copy_(randn({3, 1}).mm(randn({1, 20})));  // third head: rank one
  for (const auto accuracy : {Accuracy::kExact, Accuracy::kEstimate}) {
    const auto grouped = whole(gradient, heads_of(4, 3, "1"), ideal(), accuracy);
    EXPECT_EQ(grouped.of_blocks->ranks[kMachine], 3 + 0 + 1 + 3);
    EXPECT_NEAR(grouped.squared_norm, 7, 1e-10);
    EXPECT_TRUE(std::isfinite(grouped.of_blocks->stable_rank));
    const auto nothing = whole(torch::zeros({12, 20}, torch::kDouble), plain(), ideal(), accuracy);
    EXPECT_EQ(nothing.of_blocks->nuclear_norm, 0);
    EXPECT_EQ(nothing.of_blocks->ranks[0], 0);
    EXPECT_EQ(nothing.of_blocks->stable_rank, 0);
    EXPECT_EQ(nothing.first_order, 0);
  }
  const auto exact = whole(gradient, heads_of(4, 3, "1"));
  EXPECT_EQ(imbalance({1, 1, 1}), 0);
  EXPECT_EQ(imbalance({0, 0}), 0);
  EXPECT_NEAR(imbalance({1, 3}), 0.5, 1e-15);
  EXPECT_GT(exact.of_blocks->effective_rank, 3);
}

TEST_F(DiagnosticsTest, TheGainIsNeverNegative) {
  const std::vector<std::pair<int64_t, int64_t>> shapes = {{12, 4},  {12, 12}, {12, 100}, {24, 16},
                                                           {48, 48}, {60, 7},  {96, 48}};
  for (const auto& [rows, cols] : shapes) {
    for (const auto* grouping : {"1", "2", "3:interval", "4:random", "6:random", "all"}) {
      for (const int64_t rank : {int64_t{1}, int64_t{3}, std::min(rows, cols)}) {
        const Tensor gradient = randn({rows, rank}).mm(randn({rank, cols}));
        const auto comparison = compare(
            whole(gradient, heads_of(12, rows / 12, grouping)), whole(gradient, plain()), 1);
        EXPECT_GE(*comparison.gain, -1e-9) << rows << "x" << cols << " " << grouping;
        EXPECT_GE((*comparison.ideal_cost)[kMachine], 0);
      }
    }
  }
}

TEST_F(DiagnosticsTest, BoundsHoldOnAQuadraticAndAreExactWhereCurvatureIsTheSameAllOver) {
  constexpr double kBeta = 3;
  const Tensor w = randn({24, 30}), a = randn({24, 30});
  const double before = quadratic(w, a, kBeta);
  const Tensor gradient = kBeta * (w - a);
  for (const auto* method : {"exact", "newton_schulz"}) {
    auto options = ideal();
    options.orthogonalize.method = parse_method(method);
    for (const auto* grouping : {"1", "2:random", "6:random", "all"}) {
      const auto weight = weight_of(gradient, heads_of(12, 2, grouping));
      const auto update = measure(gradient, weight, plain(), options, Accuracy::kExact)[0];
      const Tensor direction = scaled_update(gradient, weight, options);
      for (const double lr : {0.001, 0.1, 1.0, 5.0}) {
        const double measured = before - quadratic(w - lr * direction, a, kBeta);
        // Curvature is β in every direction, so the guarantee is exact.
        EXPECT_NEAR(measured, guaranteed_decrease(update, lr, kBeta), 1e-9 * before) << grouping;
      }
    }
  }
}

TEST_F(DiagnosticsTest, BoundsHoldWhereCurvatureDiffers) {
  // L = ½ Σ λ_j (W - A)_·j², smooth with β = max λ.
  const Tensor curvature = torch::linspace(0.1, 4, 30, torch::kDouble);
  const Tensor w = randn({24, 30}), a = randn({24, 30});
  const auto loss = [&](const Tensor& x) {
    return 0.5 * ((x - a).square() * curvature).sum().item<double>();
  };
  const Tensor gradient = (w - a) * curvature;
  for (const auto* grouping : {"1", "3:random", "all"}) {
    const auto weight = weight_of(gradient, heads_of(12, 2, grouping));
    const auto update = measure(gradient, weight, plain(), ideal(), Accuracy::kExact)[0];
    const Tensor direction = scaled_update(gradient, weight, ideal());
    for (const double lr : {0.01, 0.3, 1.0, 3.0}) {
      const double decrease = loss(w) - loss(w - lr * direction);
      EXPECT_GE(decrease, guaranteed_decrease(update, lr, 4) - 1e-9) << grouping << " " << lr;
    }
  }
}

TEST_F(DiagnosticsTest, BreakEvenIsWhereBothAreGuaranteedTheSame) {
  const auto update = [](double first_order, double squared_norm) {
    Whitening result;
    result.first_order = first_order;
    result.step_squared_norm = squared_norm;
    return result;
  };
  using Pays = BreakEven::Pays;
  const double lr = 0.5;
  const auto at = [&](double first_order, double squares) {
    return compare(update(first_order, squares), update(10, 20), lr).break_even;
  };
  EXPECT_EQ(at(12, 20).pays, Pays::kAlways);
  EXPECT_EQ(at(12, 18).pays, Pays::kAlways);
  EXPECT_EQ(at(9, 20).pays, Pays::kNever);
  EXPECT_EQ(at(10, 20).pays, Pays::kNever);
  EXPECT_EQ(at(9, 22).pays, Pays::kNever);
  EXPECT_EQ(at(12, 24).pays, Pays::kBelow);
  EXPECT_EQ(at(9, 16).pays, Pays::kAbove);
  for (const auto& [first_order, squares] : {std::pair{12.0, 24.0}, {9.0, 16.0}}) {
    const double beta = at(first_order, squares).beta;
    EXPECT_NEAR(
        guaranteed_decrease(update(first_order, squares), lr, beta),
        guaranteed_decrease(update(10, 20), lr, beta), 1e-12);
  }
  EXPECT_EQ(to_string(at(12, 24)), "as long as β < 2");
  EXPECT_EQ(to_string(at(9, 16)), "as long as β > 1");
  EXPECT_EQ(compare(update(12, 24), update(10, 20), 0).break_even.pays, Pays::kUnknown);
  EXPECT_EQ(at(std::nan(""), 24).pays, Pays::kUnknown);
  EXPECT_ERROR_SAYS(compare(update(1, 1), update(1, 1), -1), "lr should be 0 or more");
}

TEST_F(DiagnosticsTest, MeasuresWhatTheOptimizerDoes) {
  // Scales, momentum and random groups as in a real step.
  const Layout layout = packed_qkv(
      {.heads = 6, .head_dim = 4},
      {.q = parse_schedule("2:random"), .k = parse_schedule("1"), .v = parse_schedule("all")});
  for (const bool nesterov : {true, false}) {
    for (const auto* method : {"newton_schulz", "gram", "exact"}) {
      StepOptions options;
      options.nesterov = nesterov;
      options.orthogonalize.method = parse_method(method);
      options.seed = 3;
      Weight weight = weight_of(torch::randn({72, 24}), layout);
      weight.layout = checked(layout, {72, 24}, "w");
      weight.momentum = torch::randn({72, 24});
      weight.step = 5;
      weight.lr = 0.1;
      const Tensor before = weight.value.clone(), momentum = weight.momentum.clone();
      const Tensor direction = look_ahead(weight, options);
      const Tensor update = scaled_update(direction, weight, options);
      const auto parts = measure(direction, weight, layout, options, Accuracy::kEstimate);
      EXPECT_TRUE(weight.momentum.equal(momentum)) << "measuring changes nothing";
      EXPECT_TRUE(weight.value.equal(before));
      step({weight}, options);
      const Tensor made = before - weight.value;
      EXPECT_LT((made - 0.1 * update).norm().item<double>(), 0.04 * made.norm().item<double>())
          << method;
      EXPECT_NEAR(
          parts[0].step_squared_norm, update.square().sum().item<double>(),
          1e-4 * parts[0].step_squared_norm);
      EXPECT_NEAR(
          parts[0].first_order, (update * weight.grad).sum().item<double>(),
          1e-3 * update.norm().item<double>());
      EXPECT_EQ(parts[1].blocks, 3);
      EXPECT_EQ(parts[2].blocks, 6);
      EXPECT_EQ(parts[3].blocks, 1);
      EXPECT_EQ(parts[1].head_norms.size(), 6);
    }
  }
}

TEST_F(DiagnosticsTest, HeadsAlongColumnsAndStacksAreMeasuredAlike) {
  const Tensor gradient = randn({3, 24, 16});
  const auto rows = whole(gradient, stacked(separate(6, 4, parse_schedule("2"))));
  EXPECT_EQ(rows.blocks, 9);
  double nuclear = 0;
  for (int64_t i = 0; i < 3; ++i) {
    nuclear += whole(gradient[i], separate(6, 4, parse_schedule("2"))).of_blocks->nuclear_norm;
  }
  EXPECT_NEAR(rows.of_blocks->nuclear_norm, nuclear, 1e-10);
  const Tensor one = gradient[0].t().contiguous();
  const auto columns = whole(one, output_projection(6, 4, parse_schedule("2")));
  EXPECT_NEAR(
      columns.of_blocks->nuclear_norm,
      whole(gradient[0], separate(6, 4, parse_schedule("2"))).of_blocks->nuclear_norm, 1e-10);
}

// The error stated in docs/theory.md: each singular value within 3e-7 of the largest, so nuclear norms within 1e-5
// and ranks within one in a thousand.
void expect_estimate_is_close(const Tensor& blocks, const char* what) {
  const auto exact = spectra(blocks, Accuracy::kExact);
  const auto estimate = spectra(blocks, Accuracy::kEstimate);
  EXPECT_NEAR(estimate.nuclear_norm, exact.nuclear_norm, 1e-5 * exact.nuclear_norm) << what;
  EXPECT_NEAR(estimate.stable_rank, exact.stable_rank, 1e-9 * exact.stable_rank) << what;
  EXPECT_NEAR(estimate.effective_rank, exact.effective_rank, 1e-3 * exact.effective_rank) << what;
  const auto lines = static_cast<double>(blocks.size(0) * std::min(blocks.size(1), blocks.size(2)));
  for (size_t i = 0; i < kRanks; ++i) {
    EXPECT_NEAR(estimate.ranks[i], exact.ranks[i], 0.001 * lines) << what << " " << i;
  }
}

TEST_F(DiagnosticsTest, TheEstimateIsWithinItsStatedError) {
  for (const auto& [rows, cols] :
       std::vector<std::pair<int64_t, int64_t>>{{16, 192}, {96, 192}, {192, 192}, {288, 96}}) {
    const Tensor noise = torch::randn({3, rows, cols});
    expect_estimate_is_close(noise, "Gaussian");
    const int64_t side = std::min(rows, cols);
    for (const int64_t rank : {int64_t{1}, int64_t{5}, side / 2}) {
      const Tensor low = torch::randn({3, rows, rank}).bmm(torch::randn({3, rank, cols}));
      expect_estimate_is_close(low, "low rank");
      expect_estimate_is_close(low + 1e-3 * noise, "low rank with noise");
    }
    const Tensor decay = torch::logspace(0, -4, side);
    const Tensor spread = std::get<0>(torch::linalg_qr(torch::randn({3, rows, side}))) * decay;
    expect_estimate_is_close(
        spread.bmm(std::get<0>(torch::linalg_qr(torch::randn({3, cols, side}))).mT()), "decaying");
  }
}

TEST_F(DiagnosticsTest, SpectraOfKnownSingularValues) {
  const Tensor sigma = torch::tensor({2.0, 1.0, 0.5, 0.05, 0.001, 0.0}, torch::kDouble);
  const Tensor block = orthonormal_rows(6, 6).mul(sigma).mm(orthonormal_rows(6, 9)).unsqueeze(0);
  const auto exact = spectra(block, Accuracy::kExact);
  EXPECT_NEAR(exact.nuclear_norm, 3.551, 1e-12);
  EXPECT_EQ(exact.ranks, (std::array<double, kRanks>{3, 4, 4, 5}));
  EXPECT_NEAR(exact.stable_rank, (4 + 1 + 0.25 + 0.0025 + 1e-6) / 4, 1e-12);
  const Tensor share = sigma / sigma.sum();
  EXPECT_NEAR(
      exact.effective_rank, std::exp(-torch::xlogy(share, share).sum().item<double>()), 1e-12);
  EXPECT_NEAR(exact.quantiles.front(), 1, 1e-12);
  EXPECT_NEAR(exact.quantiles.back(), 0, 1e-12);
  const auto twice = exact + exact;
  EXPECT_EQ(twice.count, 2);
  EXPECT_NEAR(twice.quantiles[8], exact.quantiles[8], 1e-15);
  EXPECT_NEAR(twice.nuclear_norm, 2 * 3.551, 1e-12);
  EXPECT_EQ(spectra(block, Accuracy::kEstimate).ranks, exact.ranks);
  const Tensor values = singular_values(block);
  EXPECT_TRUE(torch::allclose(values[0], sigma, 0, 1e-12));
}

TEST_F(DiagnosticsTest, MachinePrecisionIsThatOfTheData) {
  // Rank 4 also in bf16 and fp16: neither ranks nor the polar factor count what rounding adds.
  const Tensor low = randn({64, 4}).mm(randn({4, 64}));
  for (const auto type : {torch::kBFloat16, torch::kHalf, torch::kFloat, torch::kDouble}) {
    const auto full = whole(low.to(type), plain());
    EXPECT_EQ(full.of_blocks->ranks[kMachine], 4) << type;
    EXPECT_NEAR(full.squared_norm, 4, 1e-4) << type;
  }
}

TEST_F(DiagnosticsTest, TheExactUpdateHasTheStepsRankTolerance) {
  // Singular values around the tolerance, which depends on each block's own long side.
  auto options = ideal();
  options.orthogonalize.precision = torch::kFloat;
  const Tensor sigma = torch::cat(
      {torch::ones({20}, torch::kDouble), torch::full({4}, 48 * 1.2e-7, torch::kDouble)});
  std::vector<Tensor> blocks;
  for (int i = 0; i < 3; ++i) {
    blocks.push_back(orthonormal_rows(24, 24).mul(sigma).mm(orthonormal_rows(24, 24)));
  }
  Weight weight = weight_of(torch::cat(blocks), packed_qkv({.heads = 6, .head_dim = 4}));
  weight.layout = checked(weight.layout, {72, 24}, "w");
  weight.lr = 1;
  const auto measured = measure(weight.grad, weight, plain(), options, Accuracy::kExact)[0];
  options.nesterov = false;
  step({weight}, options);
  EXPECT_NEAR(weight.value.square().sum().item<double>(), measured.squared_norm, 0.1);
}

TEST_F(DiagnosticsTest, NaNIsSaidAndHeadsKeepTheirPlaces) {
  Tensor gradient = randn({24, 16});
  gradient[5][2] = std::nan("");
  const auto weight = weight_of(gradient, heads_of(6, 4, "1"));
  for (const auto accuracy : {Accuracy::kExact, Accuracy::kEstimate}) {
    const auto parts = measure(gradient, weight, weight.layout, ideal(), accuracy);
    EXPECT_TRUE(std::isnan(parts[0].of_blocks->nuclear_norm));
    ASSERT_EQ(parts[1].head_norms.size(), 6);
    EXPECT_TRUE(std::isnan(parts[1].head_norms[1]));
    EXPECT_FALSE(std::isnan(parts[1].head_norms[2]));
    EXPECT_EQ(compare(parts[0], parts[0], 1).break_even.pays, BreakEven::Pays::kUnknown);
  }
}

TEST_F(DiagnosticsTest, PackedIsTheSameWhereverAWeightIsStored) {
  const Layout heads = packed_qkv({.heads = 4, .head_dim = 3}, {.q = parse_schedule("1")});
  StepOptions options;
  options.scale.base = options.scale.transfer = ScaleRule::kMup;
  const Tensor gradient = randn({36, 12});
  const auto packed = [&](const Tensor& g, const Layout& layout) {
    return measure(g, weight_of(g, as_one_block(layout)), layout, options, Accuracy::kExact);
  };
  const auto plainly = packed(gradient, heads);
  const auto turned = packed(gradient.t().contiguous(), transposed(heads));
  ASSERT_EQ(plainly.size(), turned.size());
  for (size_t i = 0; i < plainly.size(); ++i) {
    EXPECT_NEAR(
        turned[i].step_squared_norm, plainly[i].step_squared_norm,
        0.05 * plainly[i].step_squared_norm);
    EXPECT_EQ(turned[i].rows, plainly[i].cols);
    EXPECT_EQ(turned[i].cols, plainly[i].rows);
  }
  const auto stack = packed(gradient.expand({2, 3, 36, 12}).contiguous(), stacked(heads));
  EXPECT_NEAR(
      stack[0].step_squared_norm, 6 * plainly[0].step_squared_norm,
      0.05 * stack[0].step_squared_norm);
  EXPECT_EQ(plainly[0].of_blocks->quantiles[0], 1) << "a packed matrix has a spectrum";
}

TEST_F(DiagnosticsTest, WrongInputIsNamed) {
  const Tensor gradient = randn({12, 8});
  const auto weight = weight_of(gradient, heads_of(4, 3, "1"));
  EXPECT_ERROR_SAYS(spectra(gradient, Accuracy::kExact), "count, rows, cols");
  EXPECT_ERROR_SAYS(measure(randn({3, 3}), weight, plain(), ideal(), Accuracy::kExact), "shape");
  EXPECT_ERROR_SAYS(
      measure(gradient, weight, output_projection(4, 2), ideal(), Accuracy::kExact), "columns");
}

}  // namespace
}  // namespace group_muon
