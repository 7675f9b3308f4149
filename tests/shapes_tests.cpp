// Models to plan with: public ones have as many weights as their makers say, files say what they mean.

#include <fstream>

#include "gpt/model.h"
#include "testing.h"
#include "train/shapes.h"

namespace train {
namespace {

double weights_of(const PlannedModel& model, bool active) {
  double total = 0;
  for (size_t i = 0; i < model.weights.size(); ++i) {
    const auto elements = static_cast<double>(c10::multiply_integers(model.weights[i].sizes));
    total += elements * (active ? model.active[i] : 1);
  }
  return total;
}

TEST(ShapesTest, PublicModelsHaveAsManyWeightsAsTheirMakersSay) {
  const std::vector<std::pair<const char*, double>> billions = {
      {"gpt2-small", 0.1235},  {"gpt2-xl", 1.555},         {"llama-3.1-8b", 8.03},
      {"llama-3.1-70b", 70.6}, {"llama-3.1-405b", 405.8},  {"mixtral-8x7b", 46.7},
      {"qwen3-30b-a3b", 30.5}, {"qwen3-235b-a22b", 235.1}, {"deepseek-v3", 671.0},
      {"kimi-k2", 1026.4}};
  for (const auto& [name, expected] : billions) {
    EXPECT_NEAR(weights_of(find_model(name), false) / 1e9 / expected, 1, 2e-3) << name;
  }
  EXPECT_NEAR(weights_of(find_model("qwen3-30b-a3b"), true) / 1e9, 3.3, 0.3);
  EXPECT_NEAR(weights_of(find_model("deepseek-v3"), true) / 1e9, 37, 1);
  EXPECT_NEAR(weights_of(find_model("kimi-k2"), true) / 1e9, 32, 1);
}

TEST(ShapesTest, FlopsAreThoseOfTheTrainersModel) {
  for (const int64_t kv_heads : {12, 4}) {
    const auto model = planned_model({.kv_heads = kv_heads});
    const double expected =
        gpt::training_flops_per_token({.kv_heads = kv_heads, .vocabulary = 50257});
    EXPECT_DOUBLE_EQ(training_flops_per_token(model), expected);
  }
}

TEST(ShapesTest, EveryModelCanBeGroupedAndPlanned) {
  group_muon::OrthogonalizeOptions options;
  options.precision = at::kFloat;
  for (const auto& named : named_models()) {
    const auto model = find_model(named.name, {{"layers", "2"}, {"dense-layers", "1"}});
    const auto size = group_muon::parse_schedule(c10::str(usual_group_size(model), ":random"));
    double last = 0;  // the larger the blocks, the more arithmetic
    for (const HeadGroups& groups :
         {HeadGroups{.q = size, .k = size, .v = size}, HeadGroups{}, HeadGroups{.packed = true}}) {
      const auto cost = group_muon::step_cost(
          with_groups(model, groups), 64, group_muon::StepSharing::kLocal, options);
      const double flops = group_muon::mean(cost, &group_muon::ProcessCost::flops);
      if (!groups.packed) {
        EXPECT_GE(flops, last) << named.name;
      }
      last = flops;
    }
    for (const auto& weight : with_adamw(model)) EXPECT_TRUE(weight.adamw);
  }
}

PlannedModel read(const std::string& text) {
  const TemporaryFolder folder;
  const std::string path = folder / "model.toml";
  std::ofstream(path) << text;
  return find_model(path);
}

TEST(ShapesTest, SizesConfigsAndListsOfWeightsAreRead) {
  const auto sizes =
      read("[sizes]\nlayers = 2\nwidth = 64\nheads = 4\nvocabulary = 100\ngated = true\n");
  EXPECT_EQ(sizes.weights.size(), 1 + 2 * 5);
  EXPECT_EQ(weights_of(sizes, false), 100 * 64 + 2 * (4 * 64 * 64 + 3 * 4 * 64 * 64));
  const auto config = read("[model]\nlayers = 3\nwidth = 96\n\n[schedule]\nsteps = 9\n");
  EXPECT_EQ(weights_of(config, false), 50257 * 96 + 3 * 12 * 96 * 96);
  const auto list = read(
      "[[weight]]\nname = \"a\"\nshape = [8, 6]\nlayout = \"rows q=4x2@0+2/2:random\"\ncopies = 3\n"
      "[[weight]]\nname = \"b\"\nshape = [5]\nlayout = \"adamw\"\nactive = 0.5\n");
  EXPECT_EQ(list.weights.size(), 4);
  EXPECT_EQ(list.weights[2].name, "a.2");
  EXPECT_EQ(list.active.back(), 0.5);
  EXPECT_EQ(training_flops_per_token(list), 6 * (3 * 48 + 2.5));
  EXPECT_EQ(with_groups(list, std::nullopt)[0].layout, list.weights[0].layout);
  EXPECT_EQ(usual_group_size(list), 4);
}

TEST(ShapesTest, WrongFilesSayWhatIsWrong) {
  const auto expect = [](const std::string& text, const std::string& says) {
    const auto said = error_of<c10::ValueError>([&] { read(text); });
    EXPECT_NE(said.find(says), std::string::npos) << said;
  };
  expect("[sizes]\nlayer = 3\n", "did you mean layers?");
  expect("[sizes]\nlayers = 0\n", "layers should be a whole number from 1 to 10000, not '0'");
  expect("[sizes]\ngated = 2\n", "gated should be true or false, not '2'");
  expect("[sizes]\nwidth = 10\n", "width = 10 should be a multiple of heads = 12");
  expect("[sizes]\nkv-heads = 5\n", "kv-heads = 5 should divide heads = 12");
  expect("[sizes]\nexperts = 4\nactive-experts = 5\n", "should be at most experts = 4");
  expect("[sizes]\nq-rank = 4\n", "kv-rank = 0 turns off");
  expect("sizes = 3\n", "[sizes]");
  expect("[sizes]\n[model]\n", "should have nothing else");
  expect("[[weight]]\nlayout = \"rows\"\n", "has no shape");
  expect("[[weight]]\nshape = [0, 4]\n", "a size should be a whole number from 1 to");
  expect("[[weight]]\nshape = [4]\n", "use AdamW");
  expect("[[weight]]\nshape = [4, 4]\nrows = 3\n", "has no key 'rows'");
  expect("[[weight]]\nshape = [4, 4]\nactive = 2\n", "active should be a number from 0 to 1");
  expect("[[weight]]\nshape = [4, 4]\ncopies = 1000000\n", "copies should be");
  expect("[[weight]]\nshape = [16777216, 16777216]\ncopies = 99999\n", "too large to plan with");
  expect("weight = 3\n", "[[weight]]");
}

}  // namespace
}  // namespace train
