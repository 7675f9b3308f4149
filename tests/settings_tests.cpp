// Table 1 as data: its cells and their settings.

#include <map>
#include <set>

#include "study/plan.h"
#include "study/settings.h"
#include "testing.h"
#include "train/recipe.h"

namespace study {
namespace {

// The configuration of a setting's runs, with all other options at their defaults.
std::string algorithm(const Setting& setting) {
  train::Options options = {{"data", "somewhere"}};
  options.insert(options.end(), setting.options.begin(), setting.options.end());
  const auto config = train::configure(options);
  train::check(config);
  return train::to_toml(config);
}

TEST(SettingsTest, TheTableHas37CellsOf33Runs) {
  EXPECT_EQ(table1_cells().size(), 37);
  std::map<std::string, int> rows;
  std::set<std::string> used;
  for (const auto& cell : table1_cells()) {
    ++rows[cell.row];
    used.insert(cell.setting);
    EXPECT_GT(cell.paper, 3.27);
    EXPECT_LT(cell.paper, 3.281);
  }
  EXPECT_EQ(used.size(), 33);
  EXPECT_EQ(rows["QK"], 15);
  EXPECT_EQ(rows["V"], 10);
  EXPECT_EQ(rows["Fixed-QK+V"], 10);
  EXPECT_EQ(rows["Full-QKV Muon"] + rows["Head-wise QKV MuonSplit"], 2);
  // Our addition.
  EXPECT_EQ(table1_settings().size(), 34);
  EXPECT_EQ(used.count("three-way"), 0);
}

TEST(SettingsTest, SettingsAreDifferentAlgorithmsThatTheTrainerTakes) {
  std::set<std::string> algorithms, names;
  for (const auto& setting : table1_settings()) {
    algorithms.insert(algorithm(setting));
    names.insert(setting.name);
  }
  EXPECT_EQ(algorithms.size(), table1_settings().size());
  EXPECT_EQ(names.size(), table1_settings().size());
}

TEST(SettingsTest, CellsAreWhatThePaperPrints) {
  const auto paper = [](const char* row, const char* rule, int g) {
    for (const auto& cell : table1_cells()) {
      if (cell.row == row && cell.rule == rule && cell.group_size == g) return cell;
    }
    ADD_FAILURE() << row << rule << g;
    return Cell{};
  };
  EXPECT_EQ(paper("QK", "rand.", 6).paper, 3.2722);
  EXPECT_EQ(paper("QK", "rand.", 6).setting, "qk-6-random");
  EXPECT_EQ(paper("QK", "int.", 4).paper, 3.2745);
  EXPECT_EQ(paper("V", "adj.", 4).paper, 3.2743);
  EXPECT_EQ(paper("Fixed-QK+V", "rand.", 3).paper, 3.2740);
  // With single heads all rules are the same: three cells, one setting.
  EXPECT_EQ(paper("QK", "adj.", 1).setting, "qk-1");
  EXPECT_EQ(paper("QK", "int.", 1).setting, "qk-1");
  EXPECT_EQ(paper("QK", "rand.", 1).setting, "qk-1");
  const auto options = find_setting({}, "fixed-qk-v-3-random").options;
  EXPECT_EQ(
      options,
      (train::Options{
          {"qkv", "split"}, {"qk-group", "6:random"}, {"k-group", ""}, {"v-group", "3:random"}}));
}

TEST(SettingsTest, AMisspeltNameGetsTheNearest) {
  EXPECT_ERROR_SAYS(find_setting({}, "qk-6-rndom"), "did you mean qk-6-random?");
}

}  // namespace
}  // namespace study
