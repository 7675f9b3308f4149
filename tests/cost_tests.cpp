// What a step costs on paper is what it does: products as they are counted, bytes and state by formula.

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include "group_muon/cost.h"
#include "group_muon/orthogonalize.h"
#include "testing.h"

namespace group_muon {
namespace {

SharedWeight weight(
    const std::string& name, std::vector<int64_t> sizes, const std::string& layout = "rows") {
  const auto parsed = checked(parse_layout(layout), sizes, name);
  return {.name = name, .sizes = std::move(sizes), .layout = parsed};
}

SharedWeight embedding(std::vector<int64_t> sizes) {
  return {.name = "embedding", .sizes = std::move(sizes), .adamw = true};
}

OrthogonalizeOptions iteration(Method method, Engine engine = Engine::kPortable) {
  OrthogonalizeOptions options;
  options.method = method;
  options.engine = engine;
  options.precision = at::kFloat;
  return options;
}

// FLOPs of all batched products that libtorch is asked for.
double counted = 0;
double counted_flops(const std::function<void()>& work) {
  counted = 0;
  const auto count =
      [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
    const std::string name = function.name();
    if (name != "aten::bmm" && name != "aten::baddbmm") return nullptr;
    const size_t first = name == "aten::bmm" ? 0 : 1;
    const auto a = function.inputs()[first].toTensor(), b = function.inputs()[first + 1].toTensor();
    counted += 2.0 * static_cast<double>(a.numel()) * static_cast<double>(b.size(2));
    return nullptr;
  };
  const auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback(count).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  work();
  at::removeCallback(handle);
  return counted;
}

TEST(CostTest, PortableFlopsAreThoseThatLibtorchIsAskedFor) {
  for (const auto method : {Method::kNewtonSchulz, Method::kGram, Method::kAccurateGram}) {
    for (const auto steps : {1, 3, 5, 8}) {
      for (const auto precision : {at::kFloat, at::kBFloat16}) {
        auto options = iteration(method);
        options.precision = precision;
        options.coefficients = coefficient_list("quintic", steps, 0, method);
        const at::Tensor blocks = at::ones({3, 8, 20});
        EXPECT_EQ(
            counted_flops([&] { orthogonalize(blocks, options); }), 3 * block_flops(8, 20, options))
            << method_name(method) << " " << steps;
      }
    }
  }
}

TEST(CostTest, FlopsAreThoseOfTheFormulas) {
  // m = 16, n = 48: in m³ with α = 3.
  const double cube = 16 * 16 * 16;
  EXPECT_EQ(block_flops(16, 48, iteration(Method::kNewtonSchulz)), (20 * 3 + 10) * cube);
  auto gram = iteration(Method::kGram);
  gram.restarts = {2};
  EXPECT_EQ(block_flops(16, 48, gram), (8 * 3 + 28) * cube);
  gram.engine = Engine::kAvx2;  // computes half of symmetric products
  EXPECT_EQ(block_flops(16, 48, gram), (6 * 3 + 14) * cube);
  gram.restarts = {};  // square blocks restart after every step: XXᵀ 1, R² 1, QX 2
  EXPECT_EQ(block_flops(16, 16, gram), 5 * 4 * cube);
}

TEST(CostTest, ThereIsNoEstimateForTheExactMethod) {
  EXPECT_THROW(block_flops(4, 4, iteration(Method::kExact)), c10::ValueError);
  EXPECT_THROW(step_cost({}, 0, StepSharing::kLocal, iteration(Method::kGram)), c10::ValueError);
}

TEST(CostTest, GroupsHaveTheFlopsOfTheirBlocks) {
  const auto options = iteration(Method::kNewtonSchulz);
  const auto flops = [&](const std::string& layout) {
    const auto cost =
        step_cost({weight("qkv", {144, 48}, layout)}, 1, StepSharing::kLocal, options);
    return cost.processes.at(0).flops;
  };
  EXPECT_EQ(flops("rows"), block_flops(48, 144, options));
  EXPECT_EQ(
      flops("rows q=12x4@0+4/3:random k=12x4@48+4/all~1 v=12x4@96+4/1~2"),
      4 * block_flops(12, 48, options) + block_flops(48, 48, options) +
          12 * block_flops(4, 48, options));
  // A schedule counts with its most expensive grouping.
  EXPECT_EQ(flops("rows q=36x4@0+4/1@0,12@100"), 3 * block_flops(48, 48, options));
  const auto experts =
      step_cost({weight("experts", {5, 16, 48}, "rows stack")}, 1, StepSharing::kLocal, options);
  EXPECT_EQ(experts.processes.at(0).flops, 5 * block_flops(16, 48, options));
}

std::vector<SharedWeight> some_weights(const std::string& grouping) {
  const auto layout = c10::str(
      "rows q=12x8@0+8/", grouping, " k=12x8@96+8/", grouping, "~1 v=12x8@192+8/", grouping, "~2");
  return {
      weight("qkv", {288, 96}, layout),
      weight("up", {384, 96}),
      weight("down", {96, 384}),
      weight("experts", {8, 64, 96}, "rows stack"),
      embedding({1000, 96}),
      embedding({96})};
}

double elements_of(const std::vector<SharedWeight>& weights) {
  double elements = 0;
  for (const auto& one : weights) {
    elements += static_cast<double>(c10::multiply_integers(one.sizes));
  }
  return elements;
}

TEST(CostTest, BytesAreThoseOfTheFormulas) {
  const auto weights = some_weights("3:random");
  const auto options = iteration(Method::kNewtonSchulz);
  const double elements = elements_of(weights);
  for (const int n : {1, 2, 3, 8}) {
    const double pass = 4 * elements * (n - 1) / n, flags = 8.0 * (n - 1) * 6;
    const auto cost = [&](StepSharing sharing) { return step_cost(weights, n, sharing, options); };
    const auto local = cost(StepSharing::kLocal), averaged = cost(StepSharing::kAveraged);
    EXPECT_NEAR(mean(local, &ProcessCost::sent), 2 * pass + flags, 1e-6);
    EXPECT_EQ(local.framework_sent, 0);
    EXPECT_NEAR(mean(averaged, &ProcessCost::sent), pass + flags, 1e-6);
    EXPECT_EQ(averaged.framework_sent, 2 * pass);
    // Experts stay, and of Q, K and V those that lie in one shard: shards of 288, 144, 96 or 36 rows.
    const double qkv = n == 2 ? 96 : n == 8 ? 288 : 0;
    const double crossing = 4 * (qkv + 384 + 384) * 96;
    EXPECT_NEAR(
        mean(cost(StepSharing::kSharded), &ProcessCost::sent),
        n == 1 ? 0 : 2.0 * (n - 1) / (n * n) * crossing, 1e-6);
    EXPECT_EQ(cost(StepSharing::kSharded).framework_sent, 3 * pass);
    EXPECT_NEAR(
        mean(cost(StepSharing::kGathered), &ProcessCost::sent),
        4 * (elements - 1001 * 96) * (n - 1) / n, 1e-6);
    EXPECT_EQ(mean(cost(StepSharing::kRedundant), &ProcessCost::sent), 0);
    EXPECT_EQ(cost(StepSharing::kRedundant).framework_sent, 2 * pass);
  }
}

TEST(CostTest, GroupsWithinShardsSendNothing) {
  const auto options = iteration(Method::kNewtonSchulz);
  const auto sent = [&](const std::string& grouping, int processes) {
    const auto all = some_weights(grouping);
    const auto cost = step_cost({all[0]}, processes, StepSharing::kSharded, options);
    return mean(cost, &ProcessCost::sent);
  };
  EXPECT_EQ(sent("1", 4), 0);
  EXPECT_EQ(sent("3:random:4", 4), 0);
  EXPECT_EQ(sent("3:random:4", 2), 0);
  EXPECT_GT(sent("3:random", 2), 0);
  EXPECT_GT(sent("3:random:2", 4), 0);
  EXPECT_GT(sent("all", 4), 0);
}

TEST(CostTest, SharedWorkAddsUpToThatOfOneProcess) {
  const auto weights = some_weights("2:random:3");
  const auto options = iteration(Method::kNewtonSchulz);
  const auto alone = step_cost(weights, 1, StepSharing::kLocal, options).processes.at(0);
  EXPECT_EQ(alone.state, 4 * (elements_of(weights) + 1001 * 96));
  EXPECT_EQ(alone.memory, 4 * (5 * elements_of(weights) + 2 * 1001 * 96));
  for (const auto sharing :
       {StepSharing::kLocal, StepSharing::kAveraged, StepSharing::kSharded, StepSharing::kGathered,
        StepSharing::kRedundant}) {
    const bool redundant = sharing == StepSharing::kRedundant;
    const bool all_flops = redundant || sharing == StepSharing::kGathered;
    for (const int n : {2, 3, 7}) {
      const auto cost = step_cost(weights, n, sharing, options);
      EXPECT_NEAR(mean(cost, &ProcessCost::flops) * (all_flops ? 1 : n) / alone.flops, 1, 1e-9);
      EXPECT_NEAR(mean(cost, &ProcessCost::state) * (redundant ? 1 : n) / alone.state, 1, 1e-9);
      EXPECT_NEAR(mean(cost, &ProcessCost::memory) * (redundant ? 1 : n) / alone.memory, 1, 1e-9);
      EXPECT_GE(largest(cost, &ProcessCost::flops), mean(cost, &ProcessCost::flops));
    }
  }
}

TEST(CostTest, TimeIsThatOfTheSlowestProcess) {
  StepCost cost{{{100, 20, 6, 0}, {50, 200, 0, 0}}, 4};
  EXPECT_DOUBLE_EQ(seconds_of(cost, {.flops = 10, .memory = 20, .network = 2}), 17);
  EXPECT_DOUBLE_EQ(seconds_of(cost, {.flops = 5, .memory = 40, .network = 2}), 25.5);
}

}  // namespace
}  // namespace group_muon
