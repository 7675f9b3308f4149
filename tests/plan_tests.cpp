// Study files: the plans they give, and the errors of bad ones.

#include <filesystem>
#include <fstream>
#include <set>

#include "study/folder.h"
#include "study/plan.h"
#include "study/settings.h"
#include "testing.h"
#include "train/recipe.h"

namespace study {
namespace {

class PlanTest : public ::testing::Test {
 protected:
  std::string write(const std::string& text, const std::string& name = "study.toml") {
    std::ofstream(folder_ / name) << text;
    return folder_ / name;
  }
  std::vector<PlannedRun> plan(const std::string& text) {
    return make_plan(read_study(write(text)));
  }

  TemporaryFolder folder_;
};

TEST_F(PlanTest, TheSmallStudy) {
  const auto runs = make_plan(read_study(GROUP_MUON_SOURCE "/configs/table1-small.toml"));
  std::set<std::string> names;
  int headline = 0, noise = 0, variants = 0;
  for (const auto& run : runs) {
    names.insert(run.name);
    headline += run.variant.empty() ? 1 : 0;
    noise += run.variant == "noise" ? 1 : 0;
    variants += run.variant == "half-lr" || run.variant == "double-lr" ? 1 : 0;
    auto options = run.options;
    options.emplace_back("data", "somewhere");
    train::check(train::configure(options));
  }
  EXPECT_EQ(names.size(), runs.size());
  EXPECT_EQ(headline, 5 * 8 + 29 * 2);
  EXPECT_EQ(noise, 8);
  EXPECT_EQ(variants, 2 * 5 * 3);
}

TEST_F(PlanTest, OptionsComeFromBaseFileVariantAndSetting) {
  write("[model]\nlayers = 3\nwidth = 96\n[muon]\nmuon-lr = 0.01\n", "base.toml");
  const auto runs = plan(
      "base = \"base.toml\"\nsettings = [\"packed\", \"qk-6-random\"]\nseeds = 2\n"
      "[options]\nsteps = 50\nwarmdown = 0\n"
      "[[variants]]\nname = \"fast\"\nsettings = [\"qk-6-random\"]\noptions = { muon-lr = 0.02 }\n"
      "[noise]\nsetting = \"packed\"\nseeds = 1\n");
  std::vector<std::string> names;
  for (const auto& run : runs) names.push_back(run.name);
  EXPECT_EQ(
      names, (std::vector<std::string>{
                 "packed/seed-0", "qk-6-random/seed-0", "noise/packed/seed-0",
                 "fast/qk-6-random/seed-0", "packed/seed-1", "qk-6-random/seed-1"}));
  const auto config = [&](const char* name) {
    return train::configure(find_run(runs, name).options);
  };
  EXPECT_EQ(config("packed/seed-1").layers, 3);
  EXPECT_EQ(config("packed/seed-1").steps, 50);
  EXPECT_EQ(config("packed/seed-1").seed, 1);
  EXPECT_EQ(config("packed/seed-1").qkv, "packed");
  EXPECT_EQ(config("packed/seed-1").perturb, 0);
  EXPECT_EQ(config("noise/packed/seed-0").perturb, 1);
  EXPECT_EQ(config("noise/packed/seed-0").seed, 0);
  EXPECT_EQ(config("qk-6-random/seed-0").muon.lr(), 0.01);
  EXPECT_EQ(config("fast/qk-6-random/seed-0").muon.lr(), 0.02);
  EXPECT_EQ(config("fast/qk-6-random/seed-0").qk_group, "6:random");
  EXPECT_ERROR_SAYS(find_run(runs, "packed/sed-1"), "did you mean packed/seed-1?");
}

TEST_F(PlanTest, AStudyMayDescribeSettingsOfItsOwn) {
  write("[model]\nheads = 8\nwidth = 64\n[muon]\nqk-group = \"2\"\nmomentum = 0.9\n", "base.toml");
  const auto study = read_study(write(
      "base = \"base.toml\"\nsettings = [\"three-way\"]\n"
      "[[own-settings]]\nname = \"growing\"\n"
      "options = { qk-group = \"1@0,4:random@100\", v-group = \"8\" }\n"
      "[[own-settings]]\nname = \"slow\"\noptions = { momentum = 0.99 }\n"
      "[more-seeds]\ngrowing = 2\n"
      "[[variants]]\nname = \"long\"\nsettings = [\"growing\"]\noptions = { steps = 9000, qkv-lr = "
      "0.5 }\n"));
  const auto again = read_study(write(to_toml(study), "again.toml"));
  for (const auto* one : {&study, &again}) {
    const auto runs = make_plan(*one);
    std::vector<std::string> names;
    for (const auto& run : runs) names.push_back(run.name);
    EXPECT_EQ(
        names, (std::vector<std::string>{
                   "three-way/seed-0", "growing/seed-0", "slow/seed-0", "long/growing/seed-0",
                   "growing/seed-1"}));
    const auto growing = train::configure(find_run(runs, "long/growing/seed-0").options);
    EXPECT_EQ(growing.qk_group, "1@0,4:random@100");
    EXPECT_EQ(growing.v_group, "8");
    EXPECT_EQ(growing.muon.momentum(), 0.9);
    EXPECT_EQ(growing.steps, 9000);
    EXPECT_EQ(growing.qkv_lr, 0.5);
    const auto slow = train::configure(find_run(runs, "slow/seed-0").options);
    EXPECT_EQ(slow.muon.momentum(), 0.99);
    EXPECT_EQ(slow.qk_group, train::Config().qk_group) << "the base's groups are not inherited";
  }
  EXPECT_ERROR_SAYS(find_setting(study, "grwing"), "did you mean growing?");
}

TEST_F(PlanTest, GroupsOfAPackedMatrixAreNoticed) {
  const auto folder = planned_folder(
      read_study(write(
          "settings = [\"packed\"]\n[options]\nvocabulary = 64\n[[own-settings]]\n"
          "name = \"a\"\noptions = { qkv = \"packed\", qk-group = \"1\" }\n")),
      folder_ / "out");
  EXPECT_ERROR_SAYS(check_configs(folder), "a/seed-0: ");
}

TEST_F(PlanTest, WeightsOfABaseAreFoundFromWhereTheStudyBegins) {
  write("[model]\ninit = \"weights/run\"\n", "base.toml");
  const auto study = read_study(write("base = \"base.toml\"\nsettings = [\"packed\"]\n"));
  const auto config = train::configure(make_plan(study).front().options);
  EXPECT_EQ(config.init, std::filesystem::current_path() / "weights/run");
}

TEST_F(PlanTest, ThePapersStudyHasIts37CellsAndOursByName) {
  const auto study = read_study(GROUP_MUON_SOURCE "/configs/table1.toml");
  std::set<std::string> settings, cells;
  for (const auto& run : make_plan(study)) {
    if (run.variant.empty()) settings.insert(run.setting);
    auto options = run.options;
    options.emplace_back("data", "somewhere");
    const auto config = train::configure(options);
    train::check(config);
    EXPECT_EQ(config.width, 768);
    EXPECT_EQ(config.steps, 6200);
  }
  int filled = 0;
  for (const auto& cell : table1_cells()) {
    filled += static_cast<int>(settings.count(cell.setting));
    cells.insert(cell.setting);
  }
  EXPECT_EQ(filled, 37);
  EXPECT_EQ(cells.size(), 33);
  settings.erase("three-way");  // ours
  EXPECT_EQ(settings, cells);
}

TEST_F(PlanTest, SeedsBeginWhereTheFileSays) {
  const auto runs = plan(
      "settings = [\"packed\"]\nseeds = 2\nfirst-seed = 100\n[noise]\nsetting = \"packed\"\n"
      "seeds = 1\n[[variants]]\nname = \"fast\"\nsettings = [\"packed\"]\n"
      "options = { muon-lr = 0.02 }\n");
  std::vector<std::string> names;
  for (const auto& run : runs) {
    names.push_back(run.name);
    EXPECT_EQ(train::configure(run.options).seed, run.seed);
  }
  EXPECT_EQ(
      names,
      (std::vector<std::string>{
          "packed/seed-100", "noise/packed/seed-100", "fast/packed/seed-100", "packed/seed-101"}));
}

TEST_F(PlanTest, TunedSettingsHaveTheirOwnOptionsInAllRuns) {
  const auto runs = plan(
      "settings = [\"three-way\", \"qk-1\"]\n[options]\nmuon-lr = 0.01\n"
      "[tuned]\nqk-1 = { muon-lr = 0.02, momentum = 0.9 }\n"
      "[[variants]]\nname = \"long\"\nsettings = [\"qk-1\"]\noptions = { steps = 7000 }\n");
  ASSERT_EQ(runs.size(), 3);
  EXPECT_EQ(train::configure(runs[0].options).muon.lr(), 0.01);
  for (const size_t i : {1, 2}) {
    const auto config = train::configure(runs[i].options);
    EXPECT_EQ(runs[i].setting, "qk-1");
    EXPECT_EQ(config.muon.lr(), 0.02);
    EXPECT_EQ(config.muon.momentum(), 0.9);
    EXPECT_EQ(config.qk_group, "1");
  }
}

TEST_F(PlanTest, AWrittenStudyReadsTheSame) {
  write(
      "settings = [\"packed\", \"qk-1\"]\nfirst-seed = 7\n[tuned]\nqk-1 = { muon-lr = 0.02 }\n",
      "tuned.toml");
  const auto tuned = read_study(folder_ / "tuned.toml");
  EXPECT_EQ(to_toml(read_study(write(to_toml(tuned)))), to_toml(tuned));
  EXPECT_EQ(read_study(folder_ / "study.toml").first_seed, 7);
  for (const char* name : {"table1.toml", "table1-small.toml", "demo-study.toml"}) {
    auto study = read_study(std::string(GROUP_MUON_SOURCE "/configs/") + name);
    study.data = "/somewhere/data";
    const auto again = read_study(write(to_toml(study)));
    EXPECT_EQ(to_toml(again), to_toml(study));
    EXPECT_EQ(again.data, study.data);
    EXPECT_EQ(again.keep_checkpoints, study.keep_checkpoints);
    const auto before = make_plan(study), after = make_plan(again);
    ASSERT_EQ(before.size(), after.size());
    for (size_t i = 0; i < before.size(); ++i) {
      EXPECT_EQ(before[i].name, after[i].name);
      EXPECT_EQ(train::configure(before[i].options), train::configure(after[i].options));
    }
  }
}

TEST_F(PlanTest, AFewLinesCannotAskForMillionsOfRuns) {
  std::string text = "settings = \"table1\"\nseeds = 1000\n";
  for (const char* name : {"a", "b", "c"}) {
    text += c10::str(
        "[[variants]]\nname = \"", name,
        "\"\nsettings = \"table1\"\nseeds = 1000\noptions = { batch = 1 }\n");
  }
  EXPECT_ERROR_SAYS(make_plan(read_study(write(text))), "runs; at most 100000 are allowed");
}

TEST_F(PlanTest, WrongFilesAreNamed) {
  const auto error = [&](const std::string& text) {
    return error_of([&] { read_study(write(text)); });
  };
  const auto says = [&](const std::string& text, const char* words) {
    const std::string message = error(text);
    EXPECT_NE(message.find(words), std::string::npos) << message;
    EXPECT_NE(message.find("study.toml"), std::string::npos) << message;
  };
  says("settings = [\"qk-6-rndom\"]", "did you mean qk-6-random?");
  says("setings = \"table1\"", "did you mean 'settings'?");
  says("settings = []", "list of names");
  says("seeds = 3", "no settings given");
  says("settings = [\"packed\", \"packed\"]", "listed twice");
  says("settings = \"table1\"\nseeds = 0", "from 1 to 1000");
  says("settings = \"table1\"\n[options]\nstps = 3", "did you mean 'steps'?");
  says("settings = \"table1\"\n[options]\nsteps = \"many\"", "steps should be a whole number");
  says("settings = \"table1\"\n[options]\nseed = 3", "'seed' is not allowed here");
  says("settings = \"table1\"\n[options]\nperturb = 3", "'perturb' is not allowed here");
  says("settings = \"table1\"\nseeds = 3\n[more-seeds]\npacked = 2", "already has 3 seeds");
  says("settings = \"table1\"\n[more-seeds]\npaked = 3", "did you mean packed?");
  says("settings = \"table1\"\nfirst-seed = -1", "first-seed should be a whole number from 0");
  says("settings = \"table1\"\n[tuned]\nqk1 = {}", "did you mean qk-1?");
  says("settings = \"table1\"\n[tuned]\nqk-1 = { qk-group = \"2\" }", "is part of a setting");
  says("settings = \"table1\"\n[tuned]\nqk-1 = { steps = 3 }", "not an optimizer option");
  says("settings = \"table1\"\n[tuned]\nqk-1 = 3", "should be a table");
  says(
      "settings = \"table1\"\n[tuned]\nqk-1 = { muon-lr = 0.1 }\n[[variants]]\nname = \"a\"\n"
      "settings = [\"qk-1\"]\noptions = { muon-lr = 0.2 }",
      "setting 'qk-1' sets muon-lr as well");
  says("settings = \"table1\"\n[noise]\nsetting = \"packed\"", "needs a setting and seeds");
  says(
      "settings = \"table1\"\n[[variants]]\nname = \"a/b\"\nsettings = \"table1\"\noptions = {}",
      "not start with -, unlike 'a/b'");
  says(
      "settings = \"table1\"\n[[variants]]\nname = \"a\"\nsettings = \"table1\"\noptions = {}\n"
      "[[variants]]\nname = \"a\"\nsettings = \"table1\"\noptions = {}",
      "two variants");
  says("settings = \"table1\"\nkeep-checkpoints = 3", "true or false");
  says("settings = \"table1\"\n[options]\nqkv = \"packed\"", "is part of a setting");
  says("settings = [\"packed\"]\n[more-seeds]\nqk-1 = 3", "not among the settings");
  says("settings = [\"qk-1\"]\n[noise]\nsetting = \"packed\"\nseeds = 1", "does not have");
  says("settings = [\"packed\"]\n[noise]\nsetting = \"packed\"\nseeds = 2", "does not have");
  says("settings = \"table1\"\nbase = \"nowhere.toml\"", "nowhere.toml");
  says("settings = ", "study.toml");
  const auto says_of_own = [&](const std::string& text, const char* words) {
    says("settings = \"table1\"\n[[own-settings]]\n" + text, words);
  };
  says_of_own("options = { momentum = 0.9 }", "needs a name");
  says_of_own("name = \"a\"", "setting 'a': it needs options");
  says_of_own("name = \"a\"\noptions = {}", "setting 'a': it needs options");
  says_of_own("name = \"a\"\nseeds = 3\noptions = {}", "setting 'a': there is no key 'seeds' here");
  says_of_own("name = \"lock\"\noptions = { momentum = 0.9 }", "cannot be 'lock'");
  says_of_own("name = \"-a\"\noptions = { momentum = 0.9 }", "not start with -, unlike '-a'");
  says_of_own("name = \"a/b\"\noptions = {}", "not start with -, unlike 'a/b'");
  says_of_own(
      "name = \"packed\"\noptions = { momentum = 0.9 }", "there is already a setting 'packed'");
  says_of_own("name = \"a\"\noptions = { qk-grup = \"4\" }", "did you mean 'qk-group'?");
  says_of_own("name = \"a\"\noptions = { steps = 3 }", "'steps' is not allowed here");
  says_of_own(
      "name = \"a\"\noptions = { muon-lr = 1e-3 }\n"
      "[[variants]]\nname = \"b\"\nsettings = [\"a\"]\noptions = { muon-lr = 2e-3 }",
      "variant 'b': setting 'a' sets muon-lr as well");
  EXPECT_ERROR_SAYS(read_study(folder_ / "missing.toml"), "there is no file");
}

}  // namespace
}  // namespace study
