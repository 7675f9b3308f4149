#include <gtest/gtest.h>

#include <fstream>

#include "tests/testing.h"
#include "train/config.h"
#include "train/files.h"

namespace {

using namespace train;  // NOLINT(google-build-using-namespace)

Config with(const Settings& settings) { return configure(settings); }

// What the optimizer does with Q, K and V, as the layout's text.
std::string layout_text(const Settings& settings) {
  const auto options = optimizer_options(with(settings));
  return options.layouts.empty() ? "plain" : group_muon::to_string(options.layouts[0].second);
}

TEST(ConfigTest, AFileGivesBackEveryKeyAsItWas) {
  const TemporaryFolder folder;
  // Another value for every key.
  Config config;
  for (const auto& key : config_keys()) {
    std::visit(
        [&](auto member) {
          auto& value = config.*member;
          using Value = std::decay_t<decltype(value)>;
          if constexpr (std::is_same_v<Value, std::string>) {
            value = "a \"text\" with \\ and\ttab";
          } else if constexpr (std::is_same_v<Value, bool>) {
            value = !value;
          } else if constexpr (std::is_same_v<Value, double>) {
            value = 0.1 + value / 3;
          } else {
            value += 7;
          }
        },
        key.member);
  }
  std::ofstream(folder / "config.toml") << to_toml(config);
  EXPECT_EQ(configure(read_settings(folder / "config.toml")), config);
}

TEST(ConfigTest, EveryFieldIsAKeyWithHelp) {
  size_t bytes = 0;
  for (const auto& key : config_keys()) {
    EXPECT_FALSE(std::string(key.help).empty()) << key.name;
    std::visit([&](auto member) { bytes += sizeof(Config().*member); }, key.member);
  }
  // Four bools share a word: a field without a key would make the struct larger than its keys.
  EXPECT_LT(sizeof(Config) - bytes, 5 * sizeof(int64_t));
}

TEST(ConfigTest, UnknownKeysAreErrorsWithTheNearestName) {
  const TemporaryFolder folder;
  const auto error_of_file = [&](const char* text) {
    std::ofstream(folder / "config.toml") << text;
    return error_of([&] { read_settings(folder / "config.toml"); });
  };
  EXPECT_NE(
      error_of_file("[muon]\nqk-grop = \"2\"\n").find("did you mean 'qk-group'?"),
      std::string::npos);
  EXPECT_NE(error_of_file("[muon]\nmuon_lr = 1\n").find("'muon-lr'"), std::string::npos);
  const std::string far = error_of_file("[muon]\nxyzzyplugh = 1\n");
  EXPECT_NE(far.find("no option 'xyzzyplugh'"), std::string::npos);
  EXPECT_EQ(far.find("did you mean"), std::string::npos);
  EXPECT_NE(error_of_file("[run]\nlayers = 2\n").find("belongs under [model]"), std::string::npos);
  EXPECT_NE(error_of_file("[run\n").find("config.toml"), std::string::npos);
  EXPECT_NE(error_of_file("[model]\nlayers = [1, 2]\n").find("layers"), std::string::npos);
}

TEST(ConfigTest, ValuesOfTheWrongKindAreRefusedByName) {
  EXPECT_ERROR_SAYS(with({{"layers", "two"}}), "layers should be a whole number, not 'two'");
  EXPECT_ERROR_SAYS(with({{"layers", "2.5"}}), "layers should be a whole number");
  EXPECT_ERROR_SAYS(with({{"muon-lr", "fast"}}), "muon-lr should be a number");
  EXPECT_ERROR_SAYS(with({{"nesterov", "yes"}}), "nesterov should be true or false");
  EXPECT_EQ(with({{"muon-lr", "1"}}).muon_lr, 1);
}

TEST(ConfigTest, TheLastSettingWins) { EXPECT_EQ(with({{"steps", "5"}, {"steps", "9"}}).steps, 9); }

TEST(ConfigTest, ValuesThatMakeNoSenseAreRefusedByName) {
  const auto check_with = [](const Settings& settings) { check(with(settings)); };
  check_with({});
  EXPECT_ERROR_SAYS(check_with({{"batch", "0"}}), "batch should be 1 or more, not 0");
  EXPECT_ERROR_SAYS(check_with({{"clip", "-1"}}), "clip should be 0 or more, not -1");
  EXPECT_ERROR_SAYS(check_with({{"adamw-lr", "nan"}}), "adamw-lr");
  EXPECT_ERROR_SAYS(check_with({{"precision", "fp8"}}), "bf16, fp32, not 'fp8'");
  EXPECT_ERROR_SAYS(check_with({{"heads", "7"}}), "7 heads do not divide a width of 768");
  EXPECT_ERROR_SAYS(check_with({{"qk-group", "5"}}), "qk-group = 5 does not fit 12");
  EXPECT_ERROR_SAYS(check_with({{"v-group", "2:sideways"}}), "v-group");
  EXPECT_ERROR_SAYS(check_with({{"qk-group", "6"}, {"kv-heads", "4"}}), "does not fit 4");
  EXPECT_ERROR_SAYS(check_with({{"qkv", "packed"}, {"qk-group", "2"}}), "no head groups");
  EXPECT_ERROR_SAYS(check_with({{"steps", "10"}}), "warmdown");
  EXPECT_ERROR_SAYS(check_with({{"method", "guess"}}), "guess");
  EXPECT_ERROR_SAYS(check_with({{"momentum", "1"}}), "momentum");
}

TEST(ConfigTest, EverySettingOfTable1IsReachable) {
  EXPECT_EQ(layout_text({{"qkv", "packed"}}), "plain");
  EXPECT_EQ(
      layout_text({{"qk-group", "all"}}),
      "rows q=12x64@0+64/all k=12x64@768+64/all~1 v=12x64@1536+64/all~2");
  const std::string headwise = layout_text({{"qk-group", "1"}, {"v-group", "1"}});
  EXPECT_NE(headwise.find("q=12x64@0+64/1"), std::string::npos) << headwise;
  EXPECT_NE(headwise.find("v=12x64@1536+64/1"), std::string::npos) << headwise;
  for (const char* group : {"1", "2", "3", "4", "6"}) {
    for (const char* rule : {"adjacent", "interval", "random"}) {
      const std::string text = std::string(group) + ":" + rule;
      check(with({{"qk-group", text}}));
      check(with({{"qk-group", "all"}, {"v-group", text}}));
      check(with({{"qk-group", "6:random"}, {"v-group", text}}));
    }
  }
  check(with({{"qk-group", "1@0,6:random@2000"}}));
}

TEST(ConfigTest, LearningRateFollowsTheRecipe) {
  const Config config;  // 6200 steps, the last 1800 down
  EXPECT_EQ(lr_factor(config, 0), 1);
  EXPECT_EQ(lr_factor(config, 4399), 1);
  EXPECT_EQ(lr_factor(config, 4400), 1);
  EXPECT_DOUBLE_EQ(lr_factor(config, 5300), 900.0 / 1800);
  EXPECT_DOUBLE_EQ(lr_factor(config, 6199), 1.0 / 1800);
  const Config warm = with({{"warmup", "4"}});
  EXPECT_DOUBLE_EQ(lr_factor(warm, 0), 0.25);
  EXPECT_DOUBLE_EQ(lr_factor(warm, 3), 1);
  EXPECT_DOUBLE_EQ(lr_factor(with({{"warmdown", "0"}}), 6199), 1);
}

TEST(ConfigTest, AResumedRunRefusesByNameWhatWouldMakeItAnother) {
  const Config run = with({{"steps", "300"}, {"warmdown", "10"}, {"threads", "2"}});
  std::vector<std::string> notes;
  EXPECT_EQ(reconfigure(run, {{"steps", "300"}}, notes), run);
  EXPECT_EQ(reconfigure(run, {{"keep", "5"}}, notes).keep, 5);
  EXPECT_TRUE(notes.empty());
  EXPECT_ERROR_SAYS(
      reconfigure(run, {{"steps", "400"}}, notes), "steps = 400 conflicts with the run's 300");
  EXPECT_ERROR_SAYS(reconfigure(run, {{"qk-group", "2"}}, notes), "qk-group = 2 conflicts");
  EXPECT_EQ(reconfigure(run, {{"threads", "1"}}, notes).threads, 1);
  ASSERT_EQ(notes.size(), 1);
  EXPECT_NE(notes[0].find("threads was 2 and is 1"), std::string::npos);
}

TEST(ConfigTest, NearestCountsEdits) {
  EXPECT_EQ(nearest("hedas", {"layers", "heads", "width"}), "heads");
  EXPECT_EQ(nearest("q", {"layers", "width"}), "");
}

}  // namespace
