#include "study/settings.h"

#include <c10/util/StringUtil.h>

#include <array>

namespace study {
namespace {

constexpr std::array<int, 5> kSizes = {1, 2, 3, 4, 6};

struct Rule {
  const char* paper;  // as in the table
  const char* name;
};
constexpr std::array<Rule, 3> kRules = {
    {{"adj.", "adjacent"}, {"int.", "interval"}, {"rand.", "random"}}};

// "6:random"; single heads have no rule.
std::string grouping(int g, const std::string& rule) {
  return g == 1 ? "1" : c10::str(g, ":", rule);
}

// All options that define a setting, so that none is inherited from a base configuration.
train::Options groups(const std::string& qk, const std::string& v) {
  return {{"qkv", "split"}, {"qk-group", qk}, {"k-group", ""}, {"v-group", v}};
}

// A row of the table's lower part: how its settings are named and what is grouped.
struct Row {
  const char* paper;
  const char* prefix;
  const char* title;
  bool varies_v;  // true: V varies and QK is `qk`; false: QK varies and V is whole
  const char* qk;
  std::vector<std::pair<Rule, std::array<double, 5>>> losses;
};

std::vector<Row> rows() {
  return {
      {"QK",
       "qk",
       "QK",
       false,
       "",
       {{kRules[0], {3.2787, 3.2774, 3.2770, 3.2757, 3.2743}},
        {kRules[1], {3.2778, 3.2776, 3.2767, 3.2745, 3.2750}},
        {kRules[2], {3.2759, 3.2758, 3.2746, 3.2731, 3.2722}}}},
      {"V",
       "v",
       "V",
       true,
       "all",
       {{kRules[0], {3.2806, 3.2765, 3.2780, 3.2743, 3.2781}},
        {kRules[2], {3.2806, 3.2792, 3.2769, 3.2765, 3.2769}}}},
      {"Fixed-QK+V",
       "fixed-qk-v",
       "QK g = 6 random + V",
       true,
       "6:random",
       {{kRules[0], {3.2799, 3.2770, 3.2762, 3.2761, 3.2746}},
        {kRules[2], {3.2788, 3.2782, 3.2740, 3.2744, 3.2752}}}}};
}

struct Table {
  std::vector<Setting> settings;
  std::vector<Cell> cells;
};

Table make_table() {
  Table table;
  table.settings = {
      {"packed", "Full-QKV Muon, packed", {{"k-group", ""}, {"qkv", "packed"}}},
      {"head-wise", "Head-wise QKV MuonSplit", groups("1", "1")},
      {"three-way", "Full-QKV Muon, three-way", groups("all", "all")}};
  table.cells = {
      {"Full-QKV Muon", "", 0, 3.2780, "packed"},
      {"Head-wise QKV MuonSplit", "", 0, 3.2799, "head-wise"}};
  for (const auto& row : rows()) {
    for (const auto& [rule, losses] : row.losses) {
      for (size_t i = 0; i < kSizes.size(); ++i) {
        const int g = kSizes[i];
        const std::string suffix = g == 1 ? "1" : c10::str(g, "-", rule.name);
        const std::string name = c10::str(row.prefix, "-", suffix);
        table.cells.push_back({row.paper, rule.paper, g, losses[i], name});
        if (g == 1 && &rule != &row.losses.front().first) continue;  // the same as the first rule's
        Setting setting;
        setting.name = name;
        setting.title = c10::str(row.title, " g = ", g, g == 1 ? "" : c10::str(" ", rule.name));
        const std::string own = grouping(g, rule.name);
        setting.options = row.varies_v ? groups(row.qk, own) : groups(own, "all");
        table.settings.push_back(std::move(setting));
      }
    }
  }
  return table;
}

const Table& table1() {
  static const Table table = make_table();
  return table;
}

}  // namespace

const std::vector<Setting>& table1_settings() { return table1().settings; }

const std::vector<Cell>& table1_cells() { return table1().cells; }

}  // namespace study
