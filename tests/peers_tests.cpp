// Problems that users of other Muons reported, each as a test.

#include <torch/torch.h>

#include <limits>
#include <sstream>

#include "group_muon/group_muon.h"
#include "testing.h"

namespace group_muon {
namespace {

using torch::Tensor;

Tensor parameter(std::vector<int64_t> sizes, torch::ScalarType dtype = torch::kFloat) {
  return torch::randn(sizes).to(dtype).requires_grad_();
}

GroupMuonParamState& state_of(GroupMuon& optimizer, const Tensor& parameter) {
  return static_cast<GroupMuonParamState&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()));
}

// Ratio of the largest to the smallest head norm.
double head_imbalance(const Tensor& matrix, int64_t heads) {
  const Tensor norms = matrix.view({heads, -1}).norm(2, 1);
  return (norms.max() / norms.min()).item<double>();
}

class PeersTest : public testing::Test {
 protected:
  PeersTest() { torch::manual_seed(0); }
};

// Megatron #7117: the split was decided from the local shard. Here half a weight does not fit the layout of the whole
// one and is rejected instead of being split differently.
TEST_F(PeersTest, AShardOfAWeightIsRefused) {
  const auto layout = packed_qkv({.heads = 12, .head_dim = 4});
  EXPECT_NO_THROW(GroupMuon({parameter({144, 32})}, GroupMuonOptions().layout(layout)));
  EXPECT_ERROR_SAYS(
      GroupMuon({parameter({72, 32})}, GroupMuonOptions().layout(layout)),
      "has 72 rows, but its layout declares 144");
}

// DeepSpeed #8384: a stale head count silently halved the heads. Here heads come with their size, so a wrong count
// cannot fit.
TEST_F(PeersTest, AStaleHeadCountIsRefused) {
  EXPECT_ERROR_SAYS(
      GroupMuon(
          {parameter({48, 32})}, GroupMuonOptions().layout(separate(6, 4, parse_schedule("1")))),
      "has 48 rows, but its layout declares 24 (6×4 heads)");
}

// PyTorch #190597: dividing in place corrupts the momentum when the cast to bf16 aliases it, which happens with bf16
// weights and no Nesterov.
TEST_F(PeersTest, OrthogonalizationDoesNotCorruptABf16Momentum) {
  const Tensor w = parameter({8, 16}, torch::kBFloat16);
  GroupMuon optimizer({w}, GroupMuonOptions(0.1).nesterov(false).precision("bfloat16"));
  w.mutable_grad() = torch::randn({8, 16}).to(torch::kBFloat16);
  optimizer.step();
  EXPECT_TRUE(torch::equal(state_of(optimizer, w).momentum_buffer(), w.grad()));
  optimizer.step();
  EXPECT_TRUE(
      torch::allclose(
          state_of(optimizer, w).momentum_buffer().to(torch::kFloat),
          w.grad().to(torch::kFloat) * 1.95, 1e-2));
}

// Emerging-Optimizers #230: an absolute eps of 1e-7 breaks scale invariance, for small head blocks first. A gradient
// of norm 1e-12 must give the same step as one of norm 1.
TEST_F(PeersTest, TinyGradientsMakeFullSteps) {
  const Tensor value = torch::randn({24, 16}), grad = torch::randn({24, 16});
  const auto step_for = [&](double scale, bool relative) {
    Tensor w = value.clone().requires_grad_();
    w.mutable_grad() = grad * scale;
    GroupMuon optimizer(
        {w}, GroupMuonOptions(0.1).precision("float32").relative_eps(relative).layout(
                 separate(12, 2, parse_schedule("1"))));
    optimizer.step();
    return w.detach() - value;
  };
  const Tensor normal = step_for(1, true);
  for (const double scale : {1e-12, 1e-24, 1e-30}) {
    EXPECT_TRUE(torch::allclose(step_for(scale, true), normal, 1e-3, 1e-5)) << scale;
  }
  EXPECT_FALSE(
      torch::allclose(step_for(1e-12, false), normal, 1e-1, 1e-2));  // the problem it fixes
}

// dion #24: a zero gradient gave NaN. Also tests a single zero head among others.
TEST_F(PeersTest, AZeroGradientMovesNothing) {
  for (const auto* method : {"newton_schulz", "gram", "exact"}) {
    const Tensor w = parameter({24, 16});
    const Tensor before = w.detach().clone();
    GroupMuon optimizer(
        {w}, GroupMuonOptions(0.1).method(method).layout(separate(12, 2, parse_schedule("1"))));
    w.mutable_grad() = torch::zeros_like(w);
    optimizer.step();
    EXPECT_TRUE(torch::equal(w, before));
    w.mutable_grad() = torch::randn({24, 16});
    w.mutable_grad().narrow(0, 4, 2).zero_();
    optimizer.step();
    EXPECT_TRUE(torch::equal(w.narrow(0, 4, 2), before.narrow(0, 4, 2)));
    EXPECT_TRUE(w.isfinite().all().item<bool>());
    EXPECT_FALSE(torch::equal(w, before));
  }
}

// Squares of tiny entries underflow. Norms are computed after dividing by the largest entry.
TEST_F(PeersTest, DenormalGradientsDoNotUnderflow) {
  const Tensor w = parameter({8, 16});
  const Tensor before = w.detach().clone();
  GroupMuon optimizer({w}, GroupMuonOptions(0.1).precision("float32"));
  w.mutable_grad() = torch::randn({8, 16}) * 1e-38;
  optimizer.step();
  EXPECT_GT((w - before).abs().max().item<double>(), 0.01);
  EXPECT_TRUE(w.isfinite().all().item<bool>());
}

// dion #74: empty shards hang. Here parameters without rows or gradients do no harm.
TEST_F(PeersTest, EmptyAndUnusedParametersDoNoHarm) {
  const Tensor empty = parameter({0, 16}), unused = parameter({4, 4}), used = parameter({8, 8});
  const Tensor before = used.detach().clone();
  GroupMuon optimizer({empty, unused, used}, GroupMuonOptions(0.1));
  optimizer.step();  // no parameter has a gradient yet
  empty.mutable_grad() = torch::zeros_like(empty);
  used.mutable_grad() = torch::randn_like(used);
  optimizer.step();
  EXPECT_FALSE(torch::equal(used, before));
}

// DeepSpeed #8433: resuming with another dtype fails.
TEST_F(PeersTest, AStateLoadsIntoAModelOfAnotherDtype) {
  const Tensor w = parameter({24, 16});
  GroupMuon optimizer(
      {w}, GroupMuonOptions(0.1).layout(separate(12, 2, parse_schedule("6:random"))));
  w.mutable_grad() = torch::randn_like(w);
  optimizer.step();
  std::stringstream file;
  torch::save(optimizer, file);
  const Tensor half = w.detach().to(torch::kBFloat16).requires_grad_();
  GroupMuon resumed({half});
  torch::load(resumed, file);
  half.mutable_grad() = torch::randn({24, 16}).to(torch::kBFloat16);
  resumed.step();
  EXPECT_EQ(state_of(resumed, half).momentum_buffer().scalar_type(), torch::kBFloat16);
  EXPECT_EQ(state_of(resumed, half).step(), 2);
  EXPECT_TRUE(half.isfinite().all().item<bool>());
}

// DeepSpeed #8384: gradient norms of heads differ by a factor of 6 to 8. A full update keeps part of that, a
// head-wise one evens it out.
TEST_F(PeersTest, HeadWiseUpdatesEvenOutTheHeads) {
  constexpr int64_t kHeads = 12, kRows = 8;
  const Tensor strength = torch::linspace(1, 7, kHeads).repeat_interleave(kRows).unsqueeze(1);
  // Taller than wide, so heads compete for 48 directions, as in an MLA up-projection.
  const Tensor grad = torch::randn({kHeads * kRows, 48}) * strength;
  EXPECT_GT(head_imbalance(grad, kHeads), 5.5);
  const auto update = [&](const Layout& layout) {
    Tensor w = torch::zeros({kHeads * kRows, 48}).requires_grad_();
    w.mutable_grad() = grad;
    GroupMuon optimizer({w}, GroupMuonOptions(1.0).precision("float32").layout(layout));
    optimizer.step();
    return w.detach();
  };
  EXPECT_GT(head_imbalance(update(plain()), kHeads), 1.8);
  EXPECT_LT(head_imbalance(update(separate(kHeads, kRows, parse_schedule("1"))), kHeads), 1.15);
}

// The polar factor of a tall matrix has rank at most its number of columns, so all heads share that budget. For a
// wide or square matrix, a full update already makes every head block a partial isometry.
TEST_F(PeersTest, TallMatricesShareARankBudgetAndWideOnesDoNot) {
  const auto squared_norms = [](int64_t rows, int64_t cols) {
    const OrthogonalizeOptions exact{.method = Method::kExact, .precision = torch::kDouble};
    const Tensor g = torch::randn({rows, cols}, torch::kDouble);
    const double whole = orthogonalize(g, exact).square().sum().item<double>();
    const double by_head =
        orthogonalize(g.view({rows / 4, 4, cols}), exact).square().sum().item<double>();
    return std::pair(whole, by_head);
  };
  const auto [tall, tall_by_head] = squared_norms(48, 16);
  EXPECT_NEAR(tall, 16, 1e-9);
  EXPECT_NEAR(tall_by_head, 48, 1e-9);
  const auto [wide, wide_by_head] = squared_norms(48, 64);
  EXPECT_NEAR(wide, 48, 1e-9);
  EXPECT_NEAR(wide_by_head, 48, 1e-9);
}

// nanoGPT #524: NaN handling. A NaN gradient affects its own group and nothing else.
TEST_F(PeersTest, ANanStaysInItsGroup) {
  const Tensor w = parameter({24, 16});
  GroupMuon optimizer({w}, GroupMuonOptions(0.1).layout(separate(12, 2, parse_schedule("3"))));
  w.mutable_grad() = torch::randn_like(w);
  w.mutable_grad()[7][0] = std::numeric_limits<float>::quiet_NaN();  // head 3, group {3, 4, 5}
  optimizer.step();
  EXPECT_TRUE(w.narrow(0, 6, 6).isnan().all().item<bool>());
  EXPECT_TRUE(w.narrow(0, 0, 6).isfinite().all().item<bool>());
  EXPECT_TRUE(w.narrow(0, 12, 12).isfinite().all().item<bool>());
}

// Muon #50, DeepSpeed #8367, dion #90, torchtitan #4692: fused QKV with unequal segments.
TEST_F(PeersTest, FusedQkvOfUnequalSegmentsIsTheSegmentsAlone) {
  const AttentionShape shape{.heads = 8, .head_dim = 4, .kv_heads = 2, .value_dim = 6};
  const QkvGrouping grouping{
      parse_schedule("4:interval"), parse_schedule("1"), parse_schedule("all")};
  const Tensor value = torch::randn({52, 32}), grad = torch::randn({52, 32});
  const auto update = [](const Tensor& v, const Tensor& g, const Layout& layout) {
    Tensor w = v.clone().requires_grad_();
    w.mutable_grad() = g.clone();
    GroupMuon optimizer({w}, GroupMuonOptions(0.1).precision("float64").layout(layout));
    optimizer.step();
    return w.detach();
  };
  const auto vs = value.split_with_sizes({32, 8, 12}), gs = grad.split_with_sizes({32, 8, 12});
  const Tensor expected = torch::cat(
      {update(vs[0], gs[0], separate(8, 4, grouping.q)),
       update(vs[1], gs[1], separate(2, 4, grouping.k)),
       update(vs[2], gs[2], separate(2, 6, grouping.v))});
  EXPECT_TRUE(
      torch::allclose(update(value, grad, packed_qkv(shape, grouping)), expected, 1e-6, 1e-7));
}

}  // namespace
}  // namespace group_muon
