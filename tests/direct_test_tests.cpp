// One-step tests on a real model: they measure the right thing and leave no trace.

#include <torch/torch.h>

#include <cmath>

#include "group_muon/assemble.h"
#include "testing.h"
#include "train/direct_test.h"

namespace train {
namespace {

using torch::Tensor;

const gpt::ModelShape kShape = {
    .layers = 2, .heads = 4, .width = 32, .context = 16, .vocabulary = 64};

// A model with momentum and the gradients of one batch.
class DirectTestTest : public ::testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(3);
    candidates_ = make_candidates(kShape, "1,2:random");
    tokens_ = torch::randint(0, 64, {4, 17}, torch::kLong);
    others_ = torch::randint(0, 64, {4, 17}, torch::kLong);
    group_muon::AssembleOptions options;
    options.layouts = {{"attn.c_attn.weight", candidates_[1].layout}};
    optimizer_.emplace(group_muon::assemble(model_, options));
    for (int i = 0; i < 3; ++i) {
      optimizer_->zero_grad();
      add_gradients();
      if (i < 2) optimizer_->step();
    }
    weights_ = attention_weights(*optimizer_);
  }

  static double loss(gpt::Model& model, const Tensor& tokens) {
    return model.evaluate(tokens.narrow(1, 0, 16), tokens.narrow(1, 1, 16));
  }
  void add_gradients() {
    model_.add_gradients(tokens_.narrow(1, 0, 16), tokens_.narrow(1, 1, 16), 1);
  }
  Losses losses() { return {loss(model_, tokens_), loss(model_, others_)}; }
  Region all() const {
    Region region{"all", {}};
    for (size_t w = 0; w < weights_.size(); ++w) region.pieces.push_back({w, 0, 96});
    return region;
  }
  std::vector<Tensor> copies() const {
    std::vector<Tensor> tensors;
    for (const auto& parameter : model_.parameters()) {
      tensors.push_back(parameter.detach().clone());
      tensors.push_back(parameter.grad().clone());
    }
    for (const auto& weight : weights_) tensors.push_back(weight.weight.momentum.clone());
    return tensors;
  }

  gpt::Model model_{kShape, torch::kFloat32, 5};
  std::optional<group_muon::GroupMuon> optimizer_;
  std::vector<Candidate> candidates_;
  std::vector<AttentionWeight> weights_;
  Tensor tokens_, others_;
};

void expect_same_bits(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(a[i].equal(b[i])) << i;
}

TEST_F(DirectTestTest, WeightsAreRestoredToTheBit) {
  const auto before = copies();
  {
    DirectTest test(weights_, candidates_, 0.01, [&] { return losses(); });
    test.noise();
    expect_same_bits(before, copies());
    for (size_t candidate = 0; candidate < candidates_.size(); ++candidate) {
      test.step(all(), candidate, 3, true);
      expect_same_bits(before, copies());
      test.step({"1.k", {{1, 32, 32}}}, candidate, 0.1, false);
      expect_same_bits(before, copies());
    }
    EXPECT_EQ(losses().same, test.before().same);
  }
  expect_same_bits(before, copies());
}

TEST_F(DirectTestTest, WeightsAreRestoredAfterAnError) {
  const auto before = copies();
  int calls = 0;
  try {
    DirectTest test(weights_, candidates_, 0.01, [&] {
      if (++calls == 2) throw std::runtime_error("out of memory");
      return losses();
    });
    test.step(all(), 2, 1, false);
    ADD_FAILURE() << "the error was lost";
  } catch (const std::runtime_error&) {
  }
  expect_same_bits(before, copies());
}

TEST_F(DirectTestTest, AStepIsTheOptimizersOwn) {
  // Compares with the loss after the optimizer's own step of the same grouping and rate, with all other weights
  // fixed.
  const double lr = 0.02;
  DirectStep tried;
  {
    DirectTest test(weights_, candidates_, lr, [&] { return losses(); });
    tried = test.step(all(), 1, 1, false);
  }
  const auto start = losses();
  for (auto& group : optimizer_->param_groups()) group.options().set_lr(lr);
  for (const auto& item : model_.named_parameters()) {
    if (item.key().find("c_attn") == std::string::npos) item.value().mutable_grad() = Tensor();
  }
  optimizer_->step();
  const auto after = losses();
  EXPECT_NEAR(tried.decrease, start.same - after.same, 0.05 * std::abs(tried.decrease));
  EXPECT_NEAR(
      tried.held_out_decrease, start.held_out - after.held_out,
      0.05 * std::abs(tried.held_out_decrease) + 1e-5);
}

TEST_F(DirectTestTest, SmallStepsDecreaseTheLossByTheFirstOrderTerm) {
  DirectTest test(weights_, candidates_, 1e-3, [&] { return losses(); });
  for (size_t candidate = 0; candidate < candidates_.size(); ++candidate) {
    const auto step = test.step(all(), candidate, 0.1, false);
    EXPECT_NEAR(step.decrease, step.first_order, 0.05 * std::abs(step.first_order));
    // The definition of curvature.
    EXPECT_NEAR(
        step.first_order - step.curvature / 2 * step.norm * step.norm, step.decrease, 1e-12);
    const auto rescaled = test.step(all(), candidate, 0.1, true);
    EXPECT_NEAR(rescaled.norm, test.step(all(), 1, 0.1, false).norm, 1e-6 * rescaled.norm);
  }
  EXPECT_LT(test.noise().same, 1e-5);
  EXPECT_GT(test.noise().same, 0);
}

TEST_F(DirectTestTest, CandidatesAreNamedAndChecked) {
  EXPECT_EQ(candidates_[0].name, "packed");
  EXPECT_EQ(candidates_[1].name, "three-way");
  EXPECT_EQ(candidates_[3].name, "2:random");
  EXPECT_EQ(make_candidates(kShape, "").size(), 4) << "packed, three-way, 1, 2:random";
  gpt::ModelShape paper;
  EXPECT_EQ(make_candidates(paper, "").size(), 7) << "g = 1, 2, 3, 4, 6";
  EXPECT_ERROR_SAYS(make_candidates(kShape, "3:random"), "3:random");
  EXPECT_ERROR_SAYS(make_candidates(kShape, "1,,2"), "missing");
  EXPECT_ERROR_SAYS(make_candidates(kShape, "1,1"), "the same as 1");
  EXPECT_ERROR_SAYS(make_candidates(kShape, "all"), "the same as three-way");
  const auto mixed = make_candidates(kShape, "2:random/all");
  EXPECT_EQ(mixed[2].layout.segments[2].schedule, candidates_[1].layout.segments[2].schedule);
  // Every candidate has the factor of Q, K and V.
  const auto halved = make_candidates(kShape, "2*3", false, 0.5);
  EXPECT_EQ(group_muon::to_string(halved[0].layout), "rows qkv=1x96@0+96/all*0.5");
  EXPECT_EQ(group_muon::to_string(halved[1].layout.segments[0].schedule), "4*0.5");
  EXPECT_EQ(group_muon::to_string(halved[2].layout.segments[2].schedule), "2*1.5");
  // Fewer key and value heads: they stay whole where g does not divide them.
  gpt::ModelShape multi_query = kShape;
  multi_query.kv_heads = 1;
  EXPECT_EQ(make_candidates(multi_query, "").size(), 4);
}

}  // namespace
}  // namespace train
