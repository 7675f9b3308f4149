#include <gtest/gtest.h>

#include <fstream>
#include <set>

#include "tests/testing.h"
#include "train/config.h"
#include "train/files.h"
#include "train/memory.h"
#include "train/recipe.h"

namespace {

using namespace train;  // NOLINT(google-build-using-namespace)

Config with(const Options& settings) { return configure(settings); }

// The layout of Q, K and V in its text form.
std::string layout_text(const Options& settings) {
  const auto options = optimizer_options(with(settings));
  return options.layouts.empty() ? "plain" : group_muon::to_string(options.layouts[0].second);
}

TEST(ConfigTest, AFileGivesBackEveryKeyAsItWas) {
  const TemporaryFolder folder;
  // A non-default value for every key.
  Config config;
  for (const auto& key : config_keys()) {
    const auto* option = std::get_if<const group_muon::Option*>(&key.member);
    const std::string value = get(config, key), type = option ? (*option)->type : "";
    const bool real = type == "float" || std::holds_alternative<double Config::*>(key.member);
    if (type_of(key) == Type::kSwitch) {
      set(config, key, value == "true" ? "false" : "true");
    } else if (type_of(key) == Type::kNumber) {
      set(config, key, real ? "0.1234567890123456789" : "7" + value);
    } else {
      set(config, key, type.ends_with("[]") ? "1,2,7" : "a \"text\" with \\ and\ttab");
    }
    EXPECT_NE(get(config, key), value) << key.name;
  }
  std::ofstream(folder / "config.toml") << to_toml(config);
  EXPECT_EQ(configure(read_options(folder / "config.toml")), config);
}

TEST(ConfigTest, EveryFieldIsAKeyWithHelp) {
  size_t bytes = 4 * sizeof(int64_t) + sizeof(Config::muon);  // four bools, each padded
  for (const auto& key : config_keys()) {
    EXPECT_FALSE(key.help.empty()) << key.name;
    std::visit(
        [&](auto member) {
          using M = decltype(member);
          if constexpr (!std::is_same_v<M, const group_muon::Option*>) {
            if (!std::is_same_v<M, bool Config::*>) bytes += sizeof(Config().*member);
          }
        },
        key.member);
  }
  EXPECT_EQ(bytes, sizeof(Config));  // a field without a key would make Config larger
}

TEST(ConfigTest, EveryOptionOfTheOptimizerIsAKeyOrFollowsFromOthers) {
  std::set<std::string> found = {"layout", "names", "partitions", "seed", "full_lr"};
  for (const auto& key : config_keys()) {
    const auto* option = std::get_if<const group_muon::Option*>(&key.member);
    if (option != nullptr) {
      EXPECT_TRUE(found.insert((*option)->name).second) << key.name;
    }
  }
  EXPECT_EQ(found.size(), group_muon::option_list().size());
  const Config config = with(
      {{"muon-lr", "0.5"},
       {"muon-weight-decay", "0.25"},
       {"iterations", "3"},
       {"muon-precision", "float64"},
       {"muon-engine", "portable"},
       {"tail-steps", "2"},
       {"restarts", "1,3"},
       {"rank-tolerance", "1e-3"},
       {"seed", "9"},
       {"custom-coefficients", "3,-3.2,1.2,2,-1.5,0.5"}});
  check(config);
  const auto options = optimizer_options(config).muon;
  EXPECT_EQ(
      options, group_muon::GroupMuonOptions(0.5)
                   .weight_decay(0.25)
                   .steps(3)
                   .precision("float64")
                   .engine("portable")
                   .tail_steps(2)
                   .restarts({1, 3})
                   .rank_tolerance(1e-3)
                   .seed(9)
                   .custom_coefficients({3, -3.2, 1.2, 2, -1.5, 0.5}));
}

TEST(ConfigTest, OptionsOfTheOptimizerAreRefusedByTheirNamesHere) {
  const auto check_with = [](const Options& settings) { check(with(settings)); };
  EXPECT_ERROR_SAYS(with({{"restarts", "1,x"}}), "restarts should be a whole number, not 'x'");
  EXPECT_ERROR_SAYS(check_with({{"tail-steps", "-1"}}), "tail-steps should be from 0 to 100");
  EXPECT_ERROR_SAYS(check_with({{"rank-tolerance", "1"}}), "rank-tolerance should be in [0, 1)");
  EXPECT_ERROR_SAYS(check_with({{"base-scale", "big"}}), "base-scale: unknown scale 'big': use");
  EXPECT_ERROR_SAYS(check_with({{"muon-precision", "x"}}), "muon-precision: unknown precision 'x'");
  EXPECT_ERROR_SAYS(check_with({{"muon-lr", "inf"}}), "muon-lr should be at most 1e+38, not inf");
  EXPECT_ERROR_SAYS(check_with({{"custom-coefficients", "1,2"}}), "triples a, b, c, not 2 numbers");
  EXPECT_ERROR_SAYS(
      check_with({{"restarts", "9"}}), "restarts should increase and lie between 1 and 4");
}

TEST(ConfigTest, TextsThatAFileCannotHoldAreRefused) {
  Config config;
  config.out = "tab\t and delete\x7f are fine";
  to_toml(config);
  config.out = "not utf-8: \xff";
  EXPECT_ERROR_SAYS(to_toml(config), "not UTF-8");
}

TEST(ConfigTest, LettersOutsideOfStringsAreRefusedWithTheirLine) {
  const TemporaryFolder folder;
  const auto read = [&](const std::string& text) {
    std::ofstream(folder / "config.toml") << text;
    return configure(read_options(folder / "config.toml"));
  };
  for (const char* text :
       {"\n\nü = 1", "# ü\n\nü", "\n\n[ü]", "[run]\nout = '''\n''' ü", "[run]\n\nout = 'a'ü",
        "[run]\n\nout = \"\"\"a \\ ü\"\"\""}) {
    const std::string message = error_of([&] { read(text); });
    EXPECT_NE(message.find("config.toml': "), std::string::npos) << text << message;
    EXPECT_NE(message.find("(line 3"), std::string::npos) << text << message;
  }
  for (const char* text :
       {"[run] # ü\nout = \"ü\"", "[run]\nout = 'ü' # ü", "[run]\nout = \"\"\"ü\"\"\"",
        "\xef\xbb\xbf[run]\nout = '''ü'''"}) {
    EXPECT_EQ(read(text).out, "ü") << text;
  }
  EXPECT_EQ(read("[run]\nout = \"\"\"ü\"\"\"\"\" # ü").out, "ü\"\"");
  EXPECT_EQ(read("[run]\nout = \"\"\"ü\\\n ü\"\"\"").out, "üü");
  EXPECT_ERROR_SAYS(read("a.'ü' = 1"), "there is no option 'ü'");
  EXPECT_ERROR_SAYS(read("[;]"), "config.toml': ");
}

TEST(ConfigTest, Record4IsTheRecipeToTheDigit) {
  const Config config = configure(read_options(GROUP_MUON_SOURCE "/configs/gpt2-record4.toml"));
  check(config);
  EXPECT_EQ(
      model_shape(config), (gpt::ModelShape{
                               .layers = 12,
                               .heads = 12,
                               .kv_heads = 0,
                               .width = 768,
                               .context = 1024,
                               .vocabulary = 50257}));
  EXPECT_EQ(config.batch, 512);
  Config on_gpu = config;
  on_gpu.device = "cuda";
  on_gpu = with_engine(on_gpu);
  EXPECT_EQ(on_gpu.precision, "bf16");
  EXPECT_EQ(config.adamw_lr, 3.6e-3);
  EXPECT_EQ(config.adamw_beta1, 0.9);
  EXPECT_EQ(config.adamw_beta2, 0.95);
  EXPECT_EQ(config.adamw_eps, 1e-8);
  EXPECT_EQ(config.adamw_weight_decay, 0);
  EXPECT_EQ(config.muon.lr(), 0.1 * 3.6e-3);
  EXPECT_EQ(config.muon.momentum(), 0.95);
  EXPECT_TRUE(config.muon.nesterov());
  EXPECT_FALSE(config.muon.average());
  EXPECT_EQ(config.muon.steps(), 5);
  EXPECT_EQ(config.muon.coefficients(), "quintic");
  EXPECT_EQ(on_gpu.muon.precision(), "bfloat16");
  EXPECT_EQ(config.muon.method(), "newton_schulz");
  EXPECT_EQ(config.muon.eps(), 1e-7);
  EXPECT_FALSE(config.muon.relative_eps());
  EXPECT_EQ(config.muon.base_scale(), "sqrt_max");
  EXPECT_EQ(config.muon.weight_decay(), 0);
  EXPECT_EQ(config.clip, 0);
  EXPECT_EQ(config.qkv, "split");
  EXPECT_EQ(config.qk_group, "all");
  EXPECT_EQ(config.v_group, "all");
  EXPECT_EQ(config.steps, 6200);
  EXPECT_EQ(config.warmup, 0);
  EXPECT_EQ(config.warmdown, 1800);
  EXPECT_EQ(config.validation_interval, 125);
  EXPECT_EQ(config.validation_tokens, 10'485'760);
  EXPECT_EQ(config.validation_precision, "fp32");
}

TEST(ConfigTest, RungsOfTheLadderHaveTwentyTokensPerParameter) {
  double before = 0;
  for (const char* rung : {"0", "1", "2"}) {
    const Config config =
        configure(read_options(c10::str(GROUP_MUON_SOURCE "/configs/ladder-", rung, ".toml")));
    check(config);
    const double parameters = block_weights(config) + embedding_weights(config);
    const auto steps = static_cast<double>(config.steps);
    const auto tokens = steps * static_cast<double>(config.batch * config.context);
    EXPECT_NEAR(tokens / parameters, 20, 0.01) << rung;
    EXPECT_GT(parameters, 2 * before) << rung;
    EXPECT_NEAR(static_cast<double>(config.warmdown) / steps, 0.29, 0.001) << rung;
    EXPECT_EQ(config.steps % config.validation_interval, 0) << rung;
    EXPECT_EQ(model_shape(config).head_dim(), 16) << rung;
    EXPECT_EQ(config.precision, "fp32") << rung;
    EXPECT_FALSE(config.qk_norm) << rung;
    before = parameters;
  }
}

TEST(ConfigTest, ThePapersFileAndItsBaselinesFit) {
  const Options paper = read_options(GROUP_MUON_SOURCE "/configs/gpt2-paper.toml");
  const auto with_more = [&](const Options& more) {
    Options all = paper;
    all.insert(all.end(), more.begin(), more.end());
    check(configure(all));
    return configure(all);
  };
  EXPECT_FALSE(with_more({}).muon.nesterov());
  EXPECT_EQ(with_more({}).qk_group, "6:random");
  EXPECT_EQ(with_more({{"qkv", "packed"}}).qk_group, "all");
  EXPECT_EQ(with_more({{"qk-group", "1"}, {"v-group", "1"}}).v_group, "1");
}

TEST(ConfigTest, UnknownKeysAreErrorsWithTheNearestName) {
  const TemporaryFolder folder;
  const auto error_of_file = [&](const char* text) {
    std::ofstream(folder / "config.toml") << text;
    return error_of([&] { read_options(folder / "config.toml"); });
  };
  EXPECT_NE(
      error_of_file("[muon]\nqk-grop = \"2\"\n").find("did you mean 'qk-group'?"),
      std::string::npos);
  EXPECT_NE(error_of_file("[muon]\nmuon_lr = 1\n").find("'muon-lr'"), std::string::npos);
  const std::string far = error_of_file("[muon]\nxyzzyplugh = 1\n");
  EXPECT_NE(far.find("no option 'xyzzyplugh'"), std::string::npos);
  EXPECT_EQ(far.find("did you mean"), std::string::npos);
  EXPECT_NE(error_of_file("[run]\nlayers = 2\n").find("belongs under [model]"), std::string::npos);
  EXPECT_NE(error_of_file("layers = 2\n").find("belongs under [model]"), std::string::npos);
  EXPECT_ERROR_SAYS(read_options(folder.path()), "there is no file");
  EXPECT_NE(error_of_file("[run\n").find("config.toml"), std::string::npos);
  EXPECT_NE(error_of_file("[model]\nlayers = [1, 2]\n").find("layers"), std::string::npos);
}

TEST(ConfigTest, ValuesOfTheWrongKindAreRefusedByName) {
  EXPECT_ERROR_SAYS(with({{"layers", "two"}}), "layers should be a whole number, not 'two'");
  EXPECT_ERROR_SAYS(with({{"layers", "2.5"}}), "layers should be a whole number");
  EXPECT_ERROR_SAYS(with({{"muon-lr", "fast"}}), "muon-lr should be a number");
  EXPECT_ERROR_SAYS(with({{"nesterov", "yes"}}), "nesterov should be true or false");
  EXPECT_EQ(with({{"muon-lr", "1"}}).muon.lr(), 1);
}

TEST(ConfigTest, ValuesOfEarlierVersionsAreReadUnderTheirPresentNames) {
  EXPECT_EQ(with({{"qkv", "three-way"}}).qkv, "split");
  EXPECT_EQ(with({{"coefficients", "you"}}).muon.coefficients(), "you_jiacheng");
  EXPECT_EQ(with({{"qkv", "packed"}}).qkv, "packed");
}

TEST(ConfigTest, TheLastSettingWins) { EXPECT_EQ(with({{"steps", "5"}, {"steps", "9"}}).steps, 9); }

TEST(ConfigTest, ValuesThatMakeNoSenseAreRefusedByName) {
  const auto check_with = [](const Options& settings) { check(with(settings)); };
  check_with({});
  EXPECT_ERROR_SAYS(check_with({{"batch", "0"}}), "batch should be from 1 to");
  EXPECT_ERROR_SAYS(check_with({{"clip", "-1"}}), "clip should be 0 or more, not -1");
  EXPECT_ERROR_SAYS(check_with({{"adamw-lr", "nan"}}), "adamw-lr");
  EXPECT_ERROR_SAYS(check_with({{"precision", "fp8"}}), "bf16, fp32, not 'fp8'");
  EXPECT_ERROR_SAYS(check_with({{"heads", "7"}}), "7 heads do not divide a width of 768");
  EXPECT_ERROR_SAYS(
      check_with({{"qk-group", "5"}}), "qk-group = 5 does not fit the 12 query heads");
  EXPECT_ERROR_SAYS(check_with({{"v-group", "2:sideways"}}), "v-group");
  EXPECT_ERROR_SAYS(
      check_with({{"qk-group", "6"}, {"kv-heads", "4"}}), "the 4 key and value heads");
  EXPECT_ERROR_SAYS(check_with({{"qkv", "packed"}, {"qk-group", "2"}}), "no head groups");
  EXPECT_ERROR_SAYS(check_with({{"steps", "10"}}), "warmdown");
  EXPECT_ERROR_SAYS(check_with({{"method", "guess"}}), "guess");
  EXPECT_ERROR_SAYS(check_with({{"momentum", "1"}}), "momentum should be in [0, 1), not 1");
  EXPECT_ERROR_SAYS(check_with({{"adamw-beta1", "1.5"}}), "adamw-beta1 should be below 1");
  EXPECT_ERROR_SAYS(check_with({{"device", "meta"}}), "cpu, cuda, not 'meta'");
  EXPECT_ERROR_SAYS(check_with({{"threads", "5000"}}), "threads should be from 0 to 1024");
  EXPECT_ERROR_SAYS(check_with({{"warmup", "9223372036854775807"}}), "warmup should be from 0");
  check_with(
      {{"qkv", "packed"}, {"share-qk", "true"}});  // has no effect, so that a study can vary it
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

TEST(ConfigTest, QkvHaveAFactorOnTheLearningRateSplitOrPacked) {
  EXPECT_EQ(
      layout_text({{"qkv-lr", "0.5"}, {"qk-group", "6:random*3,1@9"}, {"k-group", "2~all*2/5"}}),
      "rows q=12x64@0+64/6:random*1.5,1*0.5@9 k=12x64@768+64/2*0.5~all/5~1 "
      "v=12x64@1536+64/all*0.5~2");
  const Options packed = {{"qkv-lr", "0.5"}, {"qkv", "packed"}};
  EXPECT_EQ(layout_text(packed), "rows qkv=1x2304@0+2304/all*0.5");
  EXPECT_EQ(layout_text({{"qkv-lr", "1"}, {"qkv", "packed"}}), "plain");
  check(with(packed));
  check(with({{"qkv-lr", "0"}}));
  const auto check_with = [](const Options& settings) { check(with(settings)); };
  EXPECT_ERROR_SAYS(check_with({{"qkv-lr", "-1"}}), "qkv-lr should be 0 or more, not -1");
  EXPECT_ERROR_SAYS(
      check_with({{"qkv-lr", "1e30"}, {"v-group", "all*1e30"}}),
      "v-group = all*1e30 does not fit the 12 key and value heads: the factor on the learning");
  EXPECT_ERROR_SAYS(check_with({{"full-lr", "1"}}), "there is no option 'full-lr'");
}

TEST(ConfigTest, PartsOfSchedulesThatNoStepUsesAreNoted) {
  using Texts = std::vector<std::string>;
  const auto notes = [](const std::string& group, const Options& more) {
    Options all = {{"steps", "20"}, {"warmdown", "10"}, {"qk-group", group}};
    all.insert(all.end(), more.begin(), more.end());
    return unused_groupings(with(all));
  };
  EXPECT_EQ(notes("1,6:random@19", {}), Texts());
  EXPECT_EQ(
      notes("1,6~all/5@20", {}),
      (Texts{"qk-group = 1,6~all/5@20: step 20 is never reached; steps = 20"}));
  EXPECT_EQ(
      notes("1~all/5,6~all/4@17", {{"steps", "20"}}),
      (Texts{"qk-group = 1~all/5,6~all/4@17: '~all/4@17' is never used; steps = 20"}));
  EXPECT_EQ(notes("1,6@0.5lr", {}), Texts());
  EXPECT_EQ(
      notes("1,6@0.05lr", {}), (Texts{"qk-group = 1,6@0.05lr: '1' is never used; steps = 20"}));
  EXPECT_EQ(
      notes("1,6@0.05lr", {{"warmup", "10"}}),
      (Texts{"qk-group = 1,6@0.05lr: '1' is never used; steps = 20"}));
  EXPECT_EQ(
      notes("1,6@0.5lr", {{"warmdown", "0"}}),
      (Texts{"qk-group = 1,6@0.5lr: '1' is never used; steps = 20"}));
}

TEST(ConfigTest, LearningRateFollowsTheRecipe) {
  const Config config;  // 6200 steps, warmdown over the last 1800
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
  const Options given = {{"steps", "300"}, {"warmdown", "10"}, {"threads", "2"}};
  const Config run = with(given);
  const auto notes_with = [&](const char* name, const char* value) {
    return compare_for_resume(run, configure({{name, value}}, run));
  };
  EXPECT_TRUE(notes_with("steps", "300").empty());
  EXPECT_TRUE(notes_with("keep", "5").empty());
  EXPECT_ERROR_SAYS(notes_with("steps", "400"), "steps = 400 conflicts with the run's 300");
  EXPECT_ERROR_SAYS(notes_with("qk-group", "2"), "qk-group = 2 conflicts");
  const auto notes = notes_with("threads", "1");
  ASSERT_EQ(notes.size(), 1);
  EXPECT_NE(notes[0].find("threads changed from 2 to 1"), std::string::npos);
}

TEST(ConfigTest, NearestCountsEdits) {
  EXPECT_EQ(nearest("hedas", {"layers", "heads", "width"}), "heads");
  EXPECT_EQ(nearest("q", {"layers", "width"}), "");
}

}  // namespace
