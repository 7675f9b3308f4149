// libtorch's optimizer interface: options per group, add_param_group, state files, closures, schedulers.

#include <torch/optim/schedulers/step_lr.h>
#include <torch/torch.h>

#include <array>
#include <map>
#include <sstream>

#include "group_muon/group_muon.h"
#include "group_muon/optimizer.h"
#include "testing.h"

namespace group_muon {
namespace {

using torch::Tensor;
using torch::optim::OptimizerParamGroup;

Tensor parameter(std::vector<int64_t> sizes, torch::ScalarType dtype = torch::kFloat) {
  return torch::randn(sizes, dtype).requires_grad_();
}

void set_grads(const std::vector<Tensor>& params, int64_t step) {
  torch::manual_seed(1000 + step);
  for (auto p : params) p.mutable_grad() = torch::randn_like(p);
}

const GroupMuonOptions& group_options(const torch::optim::Optimizer& optimizer, size_t group) {
  return static_cast<const GroupMuonOptions&>(optimizer.param_groups()[group].options());
}

OptimizerParamGroup group(std::vector<Tensor> params, const GroupMuonOptions& options) {
  return {std::move(params), std::make_unique<GroupMuonOptions>(options)};
}

OptimizerParamGroup adamw_group(
    std::vector<Tensor> params, const torch::optim::AdamWOptions& options) {
  return {std::move(params), std::make_unique<torch::optim::AdamWOptions>(options)};
}

// Options without any default value: includes a schedule and names.
GroupMuonOptions unusual_options() {
  return GroupMuonOptions(0.02)
      .full_lr(0.05)
      .momentum(0.9)
      .nesterov(false)
      .average(true)
      .weight_decay(0.1)
      .layout(separate(6, 2, parse_schedule("1,3:random@2")))
      .names({"a", "b"})
      .partitions({"c", "c"})
      .seed(42)
      .method("gram")
      .coefficients("polar_express")
      .custom_coefficients({3.0, -3.2, 1.2, 2.0, -1.5, 0.5})
      .steps(2)
      .tail_steps(1)
      .restarts({1})
      .precision("float32")
      .eps(1e-6)
      .relative_eps(false)
      .rank_tolerance(1e-3)
      .base_scale("moonlight")
      .transfer("mup")
      .reference("matrix")
      .match_spectral(true)
      .row_balance(true);
}

class OptimizerTest : public testing::Test {
 protected:
  OptimizerTest() { torch::manual_seed(0); }
};

TEST_F(OptimizerTest, DefaultsAreTheScripts) {
  const GroupMuonOptions options;
  EXPECT_EQ(options.lr(), 3.6e-4);
  EXPECT_EQ(options.momentum(), 0.95);
  EXPECT_TRUE(options.nesterov());
  const auto step = step_options(options);
  EXPECT_EQ(step.orthogonalize.coefficients.size(), 5U);
  EXPECT_EQ(step.orthogonalize.precision, kAutoPrecision);
  EXPECT_EQ(step.scale.base, ScaleRule::kSqrtMax);
  EXPECT_EQ(step.scale.transfer, ScaleRule::kSqrtMax);
}

TEST_F(OptimizerTest, EveryOptionSurvivesItsText) {
  const GroupMuonOptions unusual = unusual_options().engine("portable"), initial;
  GroupMuonOptions copy;
  for (const auto& option : option_list()) {
    EXPECT_NE(option.get(unusual), option.get(initial)) << option.name;
    option.set(copy, option.get(unusual), option.name);
  }
  EXPECT_EQ(copy, unusual);
}

TEST_F(OptimizerTest, OptionsAreReadFromOneText) {
  const auto options = parse_options("momentum=0.5  restarts=1,3 method=gram", Part::kStep);
  EXPECT_EQ(options, GroupMuonOptions().momentum(0.5).restarts({1, 3}).method("gram"));
  EXPECT_EQ(parse_options("", Part::kOrthogonalize), GroupMuonOptions());
  EXPECT_ERROR_SAYS(parse_options("momentun=0.5", Part::kStep), "did you mean 'momentum'?");
  EXPECT_ERROR_SAYS(parse_options("lr=0.5", Part::kStep), "there is no option 'lr' here");
}

TEST_F(OptimizerTest, AGroupKeepsItsOwnOptionsAndInheritsTheRest) {
  const Tensor a = parameter({12, 8}), b = parameter({12, 8}), c = parameter({12, 8});
  GroupMuon optimizer(
      {group({a}, GroupMuonOptions().layout(separate(6, 2, parse_schedule("3:random")))),
       group({b}, GroupMuonOptions(0.5).nesterov(false))},
      GroupMuonOptions(0.1).momentum(0.8));
  EXPECT_EQ(group_options(optimizer, 0).lr(), 0.1);
  EXPECT_EQ(group_options(optimizer, 0).momentum(), 0.8);
  EXPECT_EQ(to_string(group_options(optimizer, 0).layout()), "rows heads=6x2@0+2/3:random");
  EXPECT_EQ(group_options(optimizer, 1).lr(), 0.5);
  EXPECT_FALSE(group_options(optimizer, 1).nesterov());
  optimizer.add_param_group(group({c}, GroupMuonOptions(0.25)));
  EXPECT_EQ(group_options(optimizer, 2).lr(), 0.25);
  EXPECT_EQ(group_options(optimizer, 2).momentum(), 0.8);
  optimizer.add_param_group(OptimizerParamGroup({parameter({4, 4})}));
  EXPECT_EQ(group_options(optimizer, 3).lr(), 0.1);
}

TEST_F(OptimizerTest, LibtorchsSchedulersDriveIt) {
  GroupMuon ours({parameter({4, 4})}, GroupMuonOptions(1.0));
  torch::optim::SGD theirs({parameter({4, 4})}, torch::optim::SGDOptions(1.0));
  torch::optim::StepLR our_scheduler(ours, /*step_size=*/2, /*gamma=*/0.5);
  torch::optim::StepLR their_scheduler(theirs, /*step_size=*/2, /*gamma=*/0.5);
  for (int i = 0; i < 8; ++i) {
    our_scheduler.step();
    their_scheduler.step();
    EXPECT_EQ(group_options(ours, 0).lr(), theirs.param_groups()[0].options().get_lr());
  }
  EXPECT_LT(group_options(ours, 0).lr(), 0.2);
}

TEST_F(OptimizerTest, TheLearningRateIsTheSizeOfTheStep) {
  const Tensor w = parameter({16, 32});
  const Tensor before = w.detach().clone();
  GroupMuon optimizer({w}, GroupMuonOptions(0.01).method("exact").precision("float32"));
  set_grads({w}, 0);
  optimizer.step();
  // With the √max scale: entries of the polar factor have mean square 1/32.
  EXPECT_NEAR((w - before).square().mean().sqrt().item<double>(), 0.01, 1e-6);
}

TEST_F(OptimizerTest, AClosureIsEvaluatedWithGradients) {
  const Tensor w = parameter({8, 8});
  GroupMuon optimizer({w}, GroupMuonOptions(0.05));
  const auto loss = [&] {
    optimizer.zero_grad();
    const Tensor value = w.square().sum();
    value.backward();
    return value;
  };
  const double first = optimizer.step(loss).item<double>();
  EXPECT_LT(optimizer.step(loss).item<double>(), first);
}

TEST_F(OptimizerTest, ParametersWithoutGradientAreLeftAlone) {
  const Tensor a = parameter({8, 8}), b = parameter({8, 8});
  const Tensor before = b.detach().clone();
  GroupMuon optimizer({a, b}, GroupMuonOptions(0.05));
  set_grads({a}, 0);
  optimizer.step();
  EXPECT_TRUE(torch::equal(b, before));
  EXPECT_EQ(optimizer.state().size(), 1U);
}

TEST_F(OptimizerTest, TheUsersGradientIsNotChanged) {
  for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
    for (const bool nesterov : {false, true}) {
      const Tensor w = parameter({8, 8}, dtype);
      GroupMuon optimizer({w}, GroupMuonOptions(0.05).nesterov(nesterov));
      set_grads({w}, 0);
      const Tensor before = w.grad().clone();
      optimizer.step();
      EXPECT_TRUE(torch::equal(w.grad(), before));
    }
  }
}

TEST_F(OptimizerTest, DecoupledWeightDecayShrinksTheWeightOnly) {
  const Tensor w = parameter({8, 8});
  const Tensor before = w.detach().clone();
  GroupMuon optimizer({w}, GroupMuonOptions(0.1).weight_decay(0.5));
  w.mutable_grad() = torch::zeros_like(w);
  optimizer.step();
  EXPECT_TRUE(torch::allclose(w, before * 0.95));
}

TEST_F(OptimizerTest, PartitionsFollowTheName) {
  // The same name and seed give the same partition at any position in the optimizer; another seed gives another.
  const Tensor value = torch::randn({24, 16}), grad = torch::randn({24, 16}),
               pad = torch::randn({4, 4});
  const auto run = [&](bool padded, const std::string& name, int64_t seed) {
    Tensor w = value.clone().requires_grad_();
    w.mutable_grad() = grad;
    Tensor other = pad.clone().requires_grad_();
    std::vector<OptimizerParamGroup> groups;
    if (padded) groups.push_back(group({other}, GroupMuonOptions(0.1).names({"other"})));
    groups.push_back(group(
        {w},
        GroupMuonOptions(0.1).names({name}).layout(separate(12, 2, parse_schedule("6:random")))));
    GroupMuon optimizer(groups, GroupMuonOptions().seed(seed).precision("float32"));
    optimizer.step();
    return w.detach();
  };
  EXPECT_TRUE(torch::equal(run(false, "w", 1), run(true, "w", 1)));
  EXPECT_FALSE(torch::equal(run(false, "w", 1), run(false, "v", 1)));
  EXPECT_FALSE(torch::equal(run(false, "w", 1), run(false, "w", 2)));
}

TEST_F(OptimizerTest, SeparateQAndKCanShareAPartition) {
  // With equal values and gradients, steps are equal if and only if the partitions are.
  const Tensor value = torch::randn({24, 16}), grad = torch::randn({24, 16});
  const auto steps_are_equal = [&](const std::vector<std::string>& partitions) {
    Tensor q = value.clone().requires_grad_(), k = value.clone().requires_grad_();
    q.mutable_grad() = k.mutable_grad() = grad;
    GroupMuon optimizer(
        {q, k}, GroupMuonOptions(0.1)
                    .names({"q", "k"})
                    .partitions(partitions)
                    .layout(separate(12, 2, parse_schedule("6:random"))));
    optimizer.step();
    return torch::equal(q, k);
  };
  EXPECT_FALSE(steps_are_equal({}));
  EXPECT_TRUE(steps_are_equal({"layer", "layer"}));
}

TEST_F(OptimizerTest, OptionsSurviveAFileWhole) {
  std::stringstream file;
  {
    GroupMuon optimizer({parameter({12, 8}), parameter({12, 8})}, unusual_options());
    torch::save(optimizer, file);
  }
  GroupMuon loaded({parameter({12, 8}), parameter({12, 8})});
  EXPECT_FALSE(group_options(loaded, 0) == unusual_options());
  torch::load(loaded, file);
  EXPECT_TRUE(group_options(loaded, 0) == unusual_options());
}

TEST_F(OptimizerTest, AFileWithoutSomeFieldsLoadsWithTheirDefaults) {
  // As written by a version without these options.
  torch::serialize::OutputArchive old;
  old.write("lr", torch::IValue(0.125));
  old.write("momentum", torch::IValue(0.5));
  std::stringstream file;
  old.save_to(file);
  torch::serialize::InputArchive archive;
  archive.load_from(file);
  GroupMuonOptions options;
  options.serialize(archive);
  EXPECT_EQ(options.lr(), 0.125);
  EXPECT_EQ(options.momentum(), 0.5);
  EXPECT_EQ(options.method(), "auto");
}

TEST_F(OptimizerTest, TheFullLearningRateIsThatOfConstructionUnlessItIsGiven) {
  const auto a = parameter({4, 6}), b = parameter({4, 6}), c = parameter({4, 6});
  GroupMuon optimizer(
      {group({a}, GroupMuonOptions()), group({b}, GroupMuonOptions(0.5)),
       group({c}, GroupMuonOptions(0.5).full_lr(2))},
      GroupMuonOptions(0.1));
  for (auto& own : optimizer.param_groups()) own.options().set_lr(0.01);
  EXPECT_EQ(group_options(optimizer, 0).full_lr(), 0.1);
  EXPECT_EQ(group_options(optimizer, 1).full_lr(), 0.5);
  EXPECT_EQ(group_options(optimizer, 2).full_lr(), 2);
  EXPECT_EQ(lr_fraction(group_options(optimizer, 0)), 0.01 / 0.1);
  EXPECT_EQ(lr_fraction(GroupMuonOptions(0)), 1);
  // Files of older versions lack it.
  auto& options = *muon_options(optimizer.param_groups()[0]);
  options.full_lr(0);
  std::stringstream file;
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  archive.save_to(file);
  GroupMuon again(
      {group({a}, GroupMuonOptions(0.3)), group({b}, GroupMuonOptions(0.3)),
       group({c}, GroupMuonOptions(0.3))});
  torch::serialize::InputArchive saved;
  saved.load_from(file);
  again.load(saved);
  EXPECT_EQ(group_options(again, 0).lr(), 0.01);
  EXPECT_EQ(group_options(again, 0).full_lr(), 0.3);
  EXPECT_EQ(group_options(again, 1).full_lr(), 0.5);
}

TEST_F(OptimizerTest, GroupingsMayFollowTheLearningRate) {
  const Tensor start = torch::randn({24, 16});
  std::vector<Tensor> weights;
  for (const bool by_hand : {false, true}) {
    Tensor w = start.clone().requires_grad_();
    GroupMuon optimizer(
        std::vector<Tensor>{w}, GroupMuonOptions(0.1).layout(separate(
                                    12, 2, parse_schedule(by_hand ? "1" : "1,6:random@0.5lr"))));
    for (int64_t step = 0; step < 6; ++step) {
      const double factor = std::array{0.25, 0.5, 1.0, 0.75, 0.49, 0.0}[step];
      optimizer.param_groups()[0].options().set_lr(0.1 * factor);
      if (by_hand) optimizer.set_grouping(parse_schedule(factor < 0.5 ? "1" : "6:random"), "");
      set_grads({w}, step);
      optimizer.step();
    }
    weights.push_back(w.detach());
  }
  EXPECT_TRUE(torch::equal(weights[0], weights[1]));
  EXPECT_FALSE(torch::equal(weights[0], start));
}

// Weights after `steps` steps. At step `restart` the state is saved and loaded into new objects.
std::vector<Tensor> train(int64_t steps, int64_t restart, const std::string& method) {
  torch::manual_seed(7);
  std::vector<Tensor> params = {parameter({72, 16}), parameter({16, 24})};
  const auto make = [&] {
    return std::make_unique<GroupMuon>(
        std::vector<OptimizerParamGroup>{
            group(
                {params[0]},
                GroupMuonOptions().layout(packed_qkv(
                    {12, 2}, {parse_schedule("6:random"), parse_schedule("1,4:random@3"),
                              parse_schedule("all")}))),
            group(
                {params[1]},
                GroupMuonOptions().layout(output_projection(12, 2, parse_schedule("3:random"))))},
        GroupMuonOptions(0.02).method(method).seed(3));
  };
  auto optimizer = make();
  for (int64_t step = 0; step < steps; ++step) {
    if (step == restart) {
      std::stringstream file;
      torch::save(*optimizer, file);
      for (auto& p : params) p = p.detach().clone().requires_grad_();
      optimizer = make();
      torch::load(*optimizer, file);
    }
    set_grads(params, step);
    optimizer->step();
  }
  return params;
}

TEST_F(OptimizerTest, SavingAndLoadingInMidTrainingIsBitIdentical) {
  for (const auto* method : {"newton_schulz", "gram", "exact"}) {
    const auto straight = train(6, -1, method);
    for (const int64_t restart : {1, 2, 3, 5}) {
      const auto resumed = train(6, restart, method);
      for (size_t i = 0; i < straight.size(); ++i)
        EXPECT_TRUE(torch::equal(straight[i], resumed[i])) << method;
    }
  }
}

TEST_F(OptimizerTest, GroupingCanChangeInMidTrainingWithoutLosingMomentum) {
  const Tensor w = parameter({24, 16});
  GroupMuon optimizer({w}, GroupMuonOptions(0.02).layout(separate(12, 2, parse_schedule("1"))));
  set_grads({w}, 0);
  optimizer.step();
  const auto momentum = [&] {
    return static_cast<GroupMuonParamState&>(*optimizer.state().at(w.unsafeGetTensorImpl()))
        .momentum_buffer()
        .clone();
  };
  const Tensor before = momentum();
  optimizer.set_grouping(parse_schedule("6:random"), "heads");
  EXPECT_EQ(to_string(group_options(optimizer, 0).layout()), "rows heads=12x2@0+2/6:random");
  EXPECT_TRUE(torch::equal(momentum(), before));
  set_grads({w}, 1);
  optimizer.step();
  EXPECT_TRUE(torch::allclose(momentum(), before * 0.95 + w.grad()));
  EXPECT_ERROR_SAYS(
      optimizer.set_grouping(parse_schedule("5"), "heads"),
      "group size 5 does not divide 12 heads");
  EXPECT_ERROR_SAYS(
      optimizer.set_grouping(parse_schedule("2"), "q"), "no parameter group has a segment 'q'");
  EXPECT_EQ(to_string(group_options(optimizer, 0).layout()), "rows heads=12x2@0+2/6:random");
}

TEST_F(OptimizerTest, ItTrains) {
  torch::manual_seed(0);
  const Tensor target = torch::randn({16, 16});
  const Tensor w = torch::zeros({16, 16}).requires_grad_();
  GroupMuon optimizer(
      {w}, GroupMuonOptions(0.05).layout(separate(4, 4, parse_schedule("2:random"))));
  double loss = 0;
  for (int step = 0; step < 100; ++step) {
    optimizer.param_groups()[0].options().set_lr(0.05 * (1 - step / 100.0));
    optimizer.zero_grad();
    const Tensor value = (w - target).square().mean();
    value.backward();
    optimizer.step();
    loss = value.item<double>();
  }
  EXPECT_LT(loss, 0.01);  // from about 1
}

TEST_F(OptimizerTest, BadUseIsRefusedAtConstruction) {
  const auto make = [](Tensor w, const GroupMuonOptions& options) {
    GroupMuon optimizer({w}, options);
  };
  const Tensor w = parameter({12, 8});
  EXPECT_ERROR_SAYS(make(w, GroupMuonOptions(-1)), "lr should be 0 or more, not -1");
  EXPECT_ERROR_SAYS(
      make(w, GroupMuonOptions().momentum(-0.5)), "momentum should be in [0, 1), not -0.5");
  EXPECT_ERROR_SAYS(make(w, GroupMuonOptions().momentum(1)), "momentum should be in [0, 1), not 1");
  EXPECT_ERROR_SAYS(
      make(w, GroupMuonOptions().weight_decay(-1)), "weight_decay should be 0 or more, not -1");
  EXPECT_ERROR_SAYS(
      make(w, GroupMuonOptions().base_scale("big")), "unknown scale 'big': use naive");
  EXPECT_ERROR_SAYS(make(w, GroupMuonOptions().method("svd")), "unknown method 'svd'");
  EXPECT_ERROR_SAYS(
      make(w, GroupMuonOptions().custom_coefficients({1, 2})),
      "should be triples a, b, c, not 2 numbers");
  EXPECT_ERROR_SAYS(
      make(w, GroupMuonOptions().names({"a", "b"})), "2 names are given for 1 parameters");
  EXPECT_ERROR_SAYS(
      make(w, GroupMuonOptions().names({"h.0.q"}).layout(separate(6, 2, parse_schedule("4")))),
      "parameter 'h.0.q', segment 'heads': group size 4 does not divide 6 heads; use one of 1, 2, "
      "3, 6");
  EXPECT_ERROR_SAYS(
      make(w, GroupMuonOptions().layout(separate(5, 2))),
      "parameter '0' has 12 rows, but its layout declares 10");
  EXPECT_ERROR_SAYS(
      make(parameter({12}), GroupMuonOptions().layout(separate(6, 2))),
      "of shape [12] has 1 dimension(s)");
  EXPECT_ERROR_SAYS(
      make(torch::ones({4, 4}, torch::kLong), {}),
      "parameter '0' is Long, but Group Muon supports only real floating-point");
  EXPECT_ERROR_SAYS(
      make(torch::zeros({4, 4}, torch::kComplexFloat).requires_grad_(), {}), "is ComplexFloat");
  EXPECT_ERROR_SAYS(
      make(torch::eye(4).to_sparse(), {}),
      "is Sparse, but Group Muon supports only dense (strided) weights");
  EXPECT_ERROR_SAYS(
      GroupMuon({OptimizerParamGroup({w}, std::make_unique<torch::optim::SGDOptions>(0.1))}),
      "should be GroupMuonOptions");
}

TEST_F(OptimizerTest, ASparseGradientIsRefused) {
  Tensor w = parameter({4, 4});
  GroupMuon optimizer({w});
  w.mutable_grad() = torch::eye(4).to_sparse();
  EXPECT_ERROR_SAYS(optimizer.step(), "parameter '0' has a sparse gradient");
}

TEST_F(OptimizerTest, ARefusedStepChangesNothing) {
  Tensor a = parameter({4, 4}), b = parameter({4, 4});
  GroupMuon optimizer({a, b});
  set_grads({a}, 0);
  b.mutable_grad() = torch::eye(4).to_sparse();
  const Tensor before = a.detach().clone();
  EXPECT_THROW(optimizer.step(), c10::Error);
  EXPECT_TRUE(torch::equal(a, before));
  EXPECT_EQ(
      static_cast<GroupMuonParamState&>(*optimizer.state().at(a.unsafeGetTensorImpl())).step(), 0);
}

// ---- Groups of AdamW, and assemble ----

TEST(AdamWGroups, EqualsLibtorchsAdamW) {
  for (const bool amsgrad : {false, true}) {
    torch::manual_seed(0);
    const Tensor value = torch::randn({30, 7});
    Tensor a = value.clone().requires_grad_(), b = value.clone().requires_grad_();
    const auto options =
        torch::optim::AdamWOptions(0.01).betas({0.9, 0.95}).weight_decay(0.1).amsgrad(amsgrad);
    GroupMuon fused({adamw_group({a}, options)});
    torch::optim::AdamW plain_adamw({b}, options);
    for (int64_t step = 0; step < 10; ++step) {
      set_grads({a, b}, step);
      b.mutable_grad() = a.grad().clone();
      fused.step();
      plain_adamw.step();
    }
    EXPECT_TRUE(torch::allclose(a, b, 1e-5, 1e-6));
  }
}

TEST(AdamWGroups, AStepRaisesTheVersionOfItsWeights) {
  Tensor w = torch::randn({3, 4}, torch::requires_grad());
  w.mutable_grad() = torch::randn({3, 4});
  GroupMuon optimizer({adamw_group({w}, torch::optim::AdamWOptions(0.1))});
  const auto before = w._version();
  optimizer.step();
  EXPECT_GT(w._version(), before);
}

TEST(AdamWGroups, SavingAndLoadingIsBitIdentical) {
  const auto train_adamw = [](bool restart) {
    torch::manual_seed(3);
    Tensor w = parameter({20});
    const auto make = [&] {
      return std::make_unique<GroupMuon>(
          std::vector{adamw_group({w}, torch::optim::AdamWOptions(0.01))});
    };
    auto optimizer = make();
    for (int64_t step = 0; step < 6; ++step) {
      if (restart && step == 3) {
        std::stringstream file;
        torch::save(*optimizer, file);
        w = w.detach().clone().requires_grad_();
        optimizer = make();
        torch::load(*optimizer, file);
      }
      set_grads({w}, step);
      optimizer->step();
    }
    return w.detach();
  };
  EXPECT_TRUE(torch::equal(train_adamw(false), train_adamw(true)));
}

TEST(AdamWGroups, AStateLoadsIntoAModelOfAnotherDtype) {
  Tensor w = parameter({20});
  GroupMuon optimizer({adamw_group({w}, torch::optim::AdamWOptions(0.01))});
  set_grads({w}, 0);
  optimizer.step();
  std::stringstream file;
  torch::save(optimizer, file);
  Tensor half = w.detach().to(torch::kBFloat16).requires_grad_();
  GroupMuon resumed({adamw_group({half}, torch::optim::AdamWOptions(0.01))});
  torch::load(resumed, file);
  set_grads({half}, 1);
  resumed.step();
  EXPECT_TRUE(half.isfinite().all().item<bool>());
}

// A matrix for Muon and a vector for AdamW, in one optimizer.
GroupMuon both(const Tensor& matrix, const Tensor& vector) {
  return GroupMuon(
      {adamw_group({vector}, torch::optim::AdamWOptions(0.01).weight_decay(0.1)),
       group(
           {matrix},
           GroupMuonOptions(0.02).layout(separate(6, 2, parse_schedule("3:random"))).seed(5))});
}

TEST(AdamWGroups, BesideMuonEachAlgorithmDoesWhatItDoesAlone) {
  torch::manual_seed(0);
  const Tensor m = parameter({12, 8}), v = parameter({20});
  const Tensor m2 = m.detach().clone().requires_grad_(), v2 = v.detach().clone().requires_grad_();
  GroupMuon one = both(m, v);
  GroupMuon adamw({adamw_group({v2}, torch::optim::AdamWOptions(0.01).weight_decay(0.1))});
  // Without names, a weight's partitions depend on its index in the optimizer.
  GroupMuon muon(
      {m2}, GroupMuonOptions(0.02)
                .layout(separate(6, 2, parse_schedule("3:random")))
                .names({"1"})
                .seed(5));
  for (int64_t step = 0; step < 4; ++step) {
    set_grads({m, v}, step);
    set_grads({m2, v2}, step);
    one.step();
    adamw.step();
    muon.step();
  }
  EXPECT_TRUE(torch::equal(m, m2));
  EXPECT_TRUE(torch::equal(v, v2));
}

TEST(AdamWGroups, OneFileHoldsBothAndGoesOnBitForBit) {
  const auto train = [](bool restart) {
    torch::manual_seed(3);
    Tensor m = parameter({12, 8}), v = parameter({20});
    auto optimizer = std::make_unique<GroupMuon>(both(m, v));
    for (int64_t step = 0; step < 6; ++step) {
      if (restart && step == 3) {
        std::stringstream file;
        torch::save(*optimizer, file);
        m = m.detach().clone().requires_grad_();
        v = v.detach().clone().requires_grad_();
        optimizer = std::make_unique<GroupMuon>(
            std::vector{adamw_group({v}, torch::optim::AdamWOptions(9)), group({m}, {})});
        torch::load(*optimizer, file);
      }
      set_grads({m, v}, step);
      optimizer->step();
    }
    return torch::cat({m.detach().flatten(), v.detach()});
  };
  EXPECT_TRUE(torch::equal(train(false), train(true)));
}

TEST(AdamWGroups, OneSchedulerAndOneZeroGradServeBoth) {
  const Tensor m = parameter({12, 8}), v = parameter({20});
  GroupMuon optimizer = both(m, v);
  torch::optim::StepLR scheduler(optimizer, /*step_size=*/1, /*gamma=*/0.5);
  scheduler.step();  // libtorch's first call changes nothing
  scheduler.step();
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.005);
  EXPECT_EQ(optimizer.param_groups()[1].options().get_lr(), 0.01);
  set_grads({m, v}, 0);
  optimizer.zero_grad();
  EXPECT_FALSE(m.grad().defined() || v.grad().defined());
}

TEST(AdamWGroups, FilesThatDoNotFitAreRefusedInWordsAndChangeNothing) {
  const Tensor m = parameter({12, 8}), v = parameter({20});
  GroupMuon optimizer = both(m, v);
  set_grads({m, v}, 0);
  optimizer.step();
  const auto load_file_of = [&](const torch::optim::Optimizer& other) {
    std::stringstream file;
    torch::save(other, file);
    torch::load(optimizer, file);
  };
  GroupMuon turned(
      {group({m}, GroupMuonOptions(7)), adamw_group({v}, torch::optim::AdamWOptions(7))});
  EXPECT_ERROR_SAYS(load_file_of(turned), "group 0 is stepped by AdamW, but by Muon in the file");
  EXPECT_ERROR_SAYS(
      load_file_of(GroupMuon({m})), "the file has 1 parameter groups, the optimizer 2");
  const torch::optim::SGD sgd(
      {OptimizerParamGroup({v}), OptimizerParamGroup({m})}, torch::optim::SGDOptions(7));
  EXPECT_ERROR_SAYS(load_file_of(sgd), "neither Group Muon's nor AdamW's");
  const GroupMuon longer(
      {adamw_group({v}, torch::optim::AdamWOptions(7)), group({m, parameter({2, 2})}, {})});
  EXPECT_ERROR_SAYS(load_file_of(longer), "group 1 has 1 weights, but 2 in the file");
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.01);
  EXPECT_EQ(optimizer.param_groups()[1].options().get_lr(), 0.02);
  EXPECT_EQ(optimizer.state().size(), 2U);
  // A file of libtorch's own AdamW fits a group of AdamW.
  GroupMuon alone({adamw_group({v}, torch::optim::AdamWOptions(0.01))});
  torch::optim::AdamW theirs({v}, torch::optim::AdamWOptions(0.5));
  set_grads({v}, 1);
  theirs.step();
  std::stringstream file;
  torch::save(theirs, file);
  torch::load(alone, file);
  EXPECT_EQ(alone.param_groups()[0].options().get_lr(), 0.5);
  EXPECT_EQ(alone.state().size(), 1U);
}

TEST(AdamWGroups, BadUseIsRefused) {
  const auto add = [](const torch::optim::AdamWOptions& options, const Tensor& w) {
    GroupMuon optimizer({parameter({4, 4})});
    optimizer.add_param_group(adamw_group({w}, options));
  };
  using Options = torch::optim::AdamWOptions;
  const Tensor v = parameter({20});
  add(Options(0.1), v);
  EXPECT_ERROR_SAYS(add(Options(-1), v), "lr of an AdamW group should be 0 or more, not -1");
  EXPECT_ERROR_SAYS(add(Options(1).betas({0.9, 1.5}), v), "in [0, 1), not 0.9 and 1.5");
  EXPECT_ERROR_SAYS(add(Options(1), torch::ones({4}, torch::kInt64)), "floating-point weights");
  EXPECT_ERROR_SAYS(add(Options(1), torch::ones({4, 4}).slice(1, 0, 2)), "with strides [4, 1]");
  GroupMuon optimizer({adamw_group({v}, Options(0.1))});
  v.mutable_grad() = torch::ones({20}).to_sparse();
  const Tensor before = v.detach().clone();
  EXPECT_ERROR_SAYS(optimizer.step(), "only dense gradients");
  EXPECT_TRUE(torch::equal(v, before));
  EXPECT_ERROR_SAYS(
      optimizer.add_param_group(
          {{parameter({2, 2})}, std::make_unique<torch::optim::SGDOptions>(0.1)}),
      "should be GroupMuonOptions or torch::optim::AdamWOptions");
}

TEST(AdamWGroups, StridesOfGradientsDoNotMatter) {
  const auto step = [](bool turned) {
    torch::manual_seed(1);
    const Tensor w = parameter({3, 4}), grad = torch::randn({3, 4});
    w.mutable_grad() = turned ? grad.t().contiguous().t() : grad;
    GroupMuon optimizer({adamw_group({w}, torch::optim::AdamWOptions(0.1))});
    optimizer.step();
    return w.detach();
  };
  EXPECT_TRUE(torch::equal(step(false), step(true)));
}

struct TinyGpt : torch::nn::Module {
  torch::nn::Embedding wte{nullptr};
  torch::nn::Linear c_attn{nullptr}, c_proj{nullptr}, lm_head{nullptr};
  Tensor gain;
  TinyGpt() {
    wte = register_module("wte", torch::nn::Embedding(32, 12));
    c_attn = register_module("c_attn", torch::nn::Linear(12, 36));
    c_proj = register_module("c_proj", torch::nn::Linear(12, 12));
    lm_head =
        register_module("lm_head", torch::nn::Linear(torch::nn::LinearOptions(12, 32).bias(false)));
    gain = register_parameter("gain", torch::ones({12}));
  }
  Tensor forward(const Tensor& tokens) {
    const auto x = wte(tokens);
    return lm_head(torch::tanh(c_proj(c_attn(x).narrow(-1, 0, 12) * gain)) + x);
  }
};

TEST(Assemble, SplitsMatricesOfTheBlocksFromTheRest) {
  TinyGpt model;
  AssembleOptions options;
  options.layouts = {{"c_attn.weight", packed_qkv({6, 2}, {.q = parse_schedule("3:random")})}};
  auto optimizer = assemble(model, options);
  ASSERT_EQ(optimizer.param_groups().size(), 3U);
  EXPECT_NE(adamw_options(optimizer.param_groups()[0]), nullptr);
  EXPECT_EQ(optimizer.param_groups()[0].params().size(), 5U);  // wte, lm_head, gain, 2 biases
  EXPECT_EQ(group_options(optimizer, 1).names(), (std::vector<std::string>{"c_attn.weight"}));
  EXPECT_EQ(group_options(optimizer, 1).layout().segments.size(), 3U);
  EXPECT_EQ(group_options(optimizer, 2).names(), (std::vector<std::string>{"c_proj.weight"}));
  EXPECT_TRUE(group_options(optimizer, 2).layout().segments.empty());
  check_whole_model(model, optimizer);
}

TEST(Assemble, WeightsThatNoGroupHasAreAnError) {
  TinyGpt model;
  const GroupMuon matrices({model.c_attn->weight, model.c_proj->weight});
  EXPECT_ERROR_SAYS(
      check_whole_model(model, matrices),
      "lacks 5 trainable weights of the model, so they would never be trained; the first is "
      "'gain'");
  for (auto& weight : model.parameters()) weight.requires_grad_(false);
  check_whole_model(model, matrices);
}

// The embedding's weight, registered under a second name in the head.
struct TiedGpt : TinyGpt {
  TiedGpt() { lm_head->register_parameter("tied", wte->weight); }
};

TEST(Assemble, ATiedWeightCountsOnce) {
  TiedGpt model;
  auto optimizer = assemble(model, {.adamw_names = {"lm_head.weight"}});
  EXPECT_EQ(optimizer.param_groups()[0].params().size(), 5U);
  EXPECT_EQ(optimizer.param_groups()[1].params().size(), 2U);
}

struct Mixed : torch::nn::Module {
  torch::nn::Conv1d conv = register_module("conv", torch::nn::Conv1d(8, 16, 3));
  torch::nn::ConvTranspose2d up = register_module("up", torch::nn::ConvTranspose2d(8, 4, 3));
  torch::nn::EmbeddingBag bag = register_module("bag", torch::nn::EmbeddingBag(32, 8));
  torch::nn::Conv1d depthwise =
      register_module("depthwise", torch::nn::Conv1d(torch::nn::Conv1dOptions(8, 8, 3).groups(8)));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(8, 4));
  torch::nn::LayerNorm norm =
      register_module("norm", torch::nn::LayerNorm(std::vector<int64_t>{2, 4}));
  torch::nn::Linear overhead = register_module("overhead", torch::nn::Linear(8, 4));
};

TEST(Assemble, ConvolutionsAreFlattenedAndEmbeddingBagsAreAdamWs) {
  Mixed model;
  auto optimizer = assemble(model);
  std::map<std::string, std::string> layouts;
  for (auto& group : optimizer.param_groups()) {
    const auto* options = muon_options(group);
    if (options == nullptr) continue;
    for (const auto& name : options->names()) layouts[name] = to_string(options->layout());
  }
  const std::map<std::string, std::string> expected = {
      {"conv.weight", "rows flatten"},
      {"up.weight", "columns transposed flatten"},
      {"overhead.weight", "rows"}};
  EXPECT_EQ(layouts, expected);
}

struct Prediction : torch::nn::Module {
  struct Inner : torch::nn::Module {
    torch::nn::Linear dense = register_module("dense", torch::nn::Linear(8, 8));
    torch::nn::LayerNorm norm =
        register_module("norm", torch::nn::LayerNorm(std::vector<int64_t>{8}));
  };
  std::shared_ptr<Inner> lm_head = register_module("lm_head", std::make_shared<Inner>());
  torch::nn::Linear classifier = register_module("classifier", torch::nn::Linear(8, 8));
  torch::nn::Linear pre_classifier = register_module("pre_classifier", torch::nn::Linear(8, 8));
};

TEST(Assemble, WhatComesBeforeAnOutputHeadIsAMatrix) {
  Prediction model;
  auto optimizer = assemble(model);
  ASSERT_EQ(optimizer.param_groups().size(), 2U);
  EXPECT_EQ(
      group_options(optimizer, 1).names(),
      (std::vector<std::string>{"lm_head.dense.weight", "pre_classifier.weight"}));
}

TEST(Assemble, ALayoutThatFitsNoWeightIsAnError) {
  TinyGpt model;
  AssembleOptions options;
  options.layouts = {{"attn.qkv.weight", packed_qkv({6, 2})}};
  EXPECT_ERROR_SAYS(
      assemble(model, options), "no matrix has a name that ends with 'attn.qkv.weight'");
}

TEST(Assemble, BothAlgorithmsTrainTheModel) {
  torch::manual_seed(0);
  TinyGpt model;
  AssembleOptions options;
  options.muon.lr(0.01);
  options.layouts = {{"c_attn.weight", packed_qkv({6, 2}, {.q = parse_schedule("3:random")})}};
  auto optimizer = assemble(model, options);
  const Tensor tokens = torch::randint(32, {64}), targets = (tokens * 7 + 3) % 32;
  double first = 0, last = 0;
  for (int step = 0; step < 60; ++step) {
    optimizer.zero_grad();
    const Tensor loss = torch::nn::functional::cross_entropy(model.forward(tokens), targets);
    loss.backward();
    optimizer.step();
    (step == 0 ? first : last) = loss.item<double>();
  }
  EXPECT_LT(last, first / 4);
}

}  // namespace
}  // namespace group_muon
