#include "study/report.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "study/analysis.h"
#include "study/claims.h"
#include "study/report_page.h"  // generated from report.html by the build
#include "study/results.h"
#include "study/settings.h"
#include "study/tables.h"
#include "train/files.h"

namespace study {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;  // NaN becomes null

Json to_json(const Band& band) {
  return {
      {"steps", band.steps},
      {"count", band.count},
      {"mean", band.mean},
      {"low", band.low},
      {"high", band.high}};
}

// Fractions of the baseline's steps. Without a mean if some seeds never get to its loss.
Json to_json(const StepsToLoss& steps) {
  Json json = {
      {"seeds", steps.seeds},
      {"reached", steps.reached},
      {"median", steps.median},
      {"words", words_of(steps)}};
  if (!steps.less) return json;
  const auto& less = *steps.less;
  json.update(
      {{"mean", 1 + less.mean},
       {"low", 1 + less.low},
       {"high", 1 + less.high},
       {"simultaneous_low", 1 + less.simultaneous_low},
       {"simultaneous_high", 1 + less.simultaneous_high},
       {"p", less.p},
       {"holm", steps.holm},
       {"mark", to_string(steps.mark)}});
  return json;
}

Json to_json(const BaselineComparison& comparison) {
  const auto& difference = comparison.difference;
  return {
      {"count", difference.count},
      {"mean", difference.mean},
      {"low", difference.low},
      {"high", difference.high},
      {"simultaneous_low", difference.simultaneous_low},
      {"simultaneous_high", difference.simultaneous_high},
      {"p", difference.p},
      {"holm", comparison.holm},
      {"exploratory", comparison.exploratory},
      {"family", comparison.family},
      {"mark", to_string(comparison.mark)},
      {"steps", to_json(comparison.steps)}};
}

Json to_json(const SettingSummary& summary) {
  Json against;
  for (const char* baseline : kBaselines) {
    const auto found = summary.against.find(baseline);
    against[baseline] = found == summary.against.end() ? Json() : to_json(found->second);
  }
  Json own;
  for (const auto& [key, value] : summary.own) own[key] = value;
  return {
      {"name", summary.name},
      {"title", summary.title},
      {"own", own},
      {"count", summary.loss.count},
      {"failed", summary.failed},
      {"exploratory", summary.exploratory},
      {"mean", summary.loss.mean},
      {"deviation", summary.loss.deviation},
      {"against", against},
      {"cost",
       {{"tokens_per_second", summary.tokens_per_second},
        {"slowest", summary.slowest},
        {"fastest", summary.fastest},
        {"optimizer_share", summary.optimizer_share},
        {"seconds", summary.seconds}}}};
}

// "settings", "curves" and "differences" of a variant.
Json to_json(const VariantSummary& summary) {
  Json settings = Json::array(), curves = Json::object(), differences = Json::object();
  for (const char* baseline : kBaselines) differences[baseline] = Json::object();
  for (const auto& setting : summary.settings) {
    settings.push_back(to_json(setting));
    if (setting.curve.count > 0) curves[setting.name] = to_json(setting.curve);
    for (const auto& [baseline, band] : setting.differences) {
      differences[baseline][setting.name] = to_json(band);
    }
  }
  return {{"settings", settings}, {"curves", curves}, {"differences", differences}};
}

Json cells_of(const Analysis& analysis) {
  Json list = Json::array();
  const auto& cells = table1_cells();
  for (size_t i = 0; i < cells.size(); ++i) {
    list.push_back(
        {{"row", cells[i].row},
         {"rule", cells[i].rule},
         {"group_size", cells[i].group_size},
         {"paper", cells[i].paper},
         {"paper_best", is_papers_best_rule(i)},
         {"setting", cells[i].setting},
         {"best", is_best_rule(analysis.main, i)}});
  }
  return list;
}

Json to_json(const Noise& noise) {
  return {{"setting", noise.setting},      {"count", noise.difference.count},
          {"mean", noise.difference.mean}, {"deviation", noise.deviation},
          {"low", noise.difference.low},   {"high", noise.difference.high},
          {"largest", noise.largest}};
}

Json to_json(const DiagnosticSeries& series) {
  return {
      {"of", series.of},
      {"grouping", series.grouping},
      {"steps", series.steps},
      {"rank_ratio", series.rank_ratio},
      {"rank_ratio_machine", series.rank_ratio_machine},
      {"squared_norm_ratio", series.squared_norm_ratio},
      {"gain", series.gain},
      {"first_order_gain", series.first_order_gain},
      {"norm_cost", series.norm_cost}};
}

std::string state_of(const RunResult& result) {
  if (!result.readable) return "unreadable";
  switch (result.state) {
    case RunState::kFinished:
      return "finished";
    case RunState::kFailed:
      return "failed";
    case RunState::kRunning:
      return "running";
    default:
      return "waiting";
  }
}

// Keys with the same value in all started runs.
std::map<std::string, std::string> common_config(const Results& results) {
  std::map<std::string, std::string> common;
  bool first = true;
  for (const auto& result : results.runs) {
    if (result.config.empty()) continue;
    if (first) common = result.config;
    first = false;
    for (auto item = common.begin(); item != common.end();) {
      const auto other = result.config.find(item->first);
      const bool same = other != result.config.end() && other->second == item->second;
      item = same ? std::next(item) : common.erase(item);
    }
  }
  return common;
}

Json runs_of(const Results& results, const std::map<std::string, std::string>& common) {
  Json list = Json::array();
  for (const auto& result : results.runs) {
    Json config = Json::object();
    for (const auto& [key, value] : result.config) {
      if (common.count(key) == 0) config[key] = value;
    }
    list.push_back(
        {{"name", result.run.name},
         {"setting", result.run.setting},
         {"variant", result.run.variant},
         {"seed", result.run.seed},
         {"state", state_of(result)},
         {"loss", result.loss},
         {"seconds", result.seconds},
         {"tokens_per_second", result.tokens_per_second},
         {"error", result.error},
         {"config", config},
         {"machines", result.machines}});
  }
  return list;
}

Json variants_of(const Analysis& analysis) {
  Json list = Json::array();
  for (const auto& variant : analysis.variants) {
    Json json = {{"name", variant.name}, {"options", Json::object()}};
    for (const auto& [key, value] : variant.options) json["options"][key] = value;
    json.update(to_json(variant));
    list.push_back(json);
  }
  return list;
}

Json to_json(const BestValues& values) {
  Json settings = Json::array();
  for (const auto& setting : values.settings) {
    Json tried = Json::array();
    for (const auto& one : setting.tried) {
      tried.push_back(
          {{"value", one.value},
           {"count", one.loss.count},
           {"failed", one.failed},
           {"mean", one.loss.mean},
           {"deviation", one.loss.deviation}});
    }
    settings.push_back(
        {{"name", setting.setting},
         {"title", setting.title},
         {"tried", tried},
         {"best", setting.best},
         {"at_edge", setting.at_edge}});
  }
  return {{"key", values.key}, {"settings", settings}};
}

Json best_values_of(const Analysis& analysis) {
  Json list = Json::array();
  for (const auto& values : analysis.best_values) list.push_back(to_json(values));
  return list;
}

Json to_json(const std::vector<Claim>& claims) {
  Json list = Json::array();
  for (const auto& claim : claims) {
    list.push_back(
        {{"number", claim.number},
         {"claim", claim.text},
         {"verdict", to_string(claim.verdict)},
         {"words", words_of(claim)},
         {"evidence", claim.evidence}});
  }
  return list;
}

Json diagnostics_of(const Results& results) {
  Json list = Json::array();
  for (const auto& result : results.runs) {
    if (result.diagnostics.empty()) continue;
    Json series = Json::array();
    for (const auto& item : result.diagnostics) series.push_back(to_json(item));
    list.push_back({{"run", result.run.name}, {"series", series}});
  }
  return list;
}

Json counts_of(const Results& results) {
  Json counts = {{"planned", results.runs.size()}};
  for (const char* state : {"finished", "running", "failed", "unreadable", "waiting"}) {
    counts[state] = std::count_if(
        results.runs.begin(), results.runs.end(),
        [&](const auto& result) { return state_of(result) == state; });
  }
  return counts;
}

Json to_json(
    const Folder& folder, const Results& results, const Analysis& analysis,
    const std::vector<Claim>& claims) {
  const auto config = train::configure(folder.study.options);
  const auto common = common_config(results);
  Json json = {
      {"version", GROUP_MUON_VERSION},
      {"name", fs::canonical(folder.path).filename().string()},
      {"counts", counts_of(results)},
      {"steps", config.steps},
      {"tokens_per_step", config.batch * config.context},
      {"common_config", common},
      {"cells", cells_of(analysis)},
      {"noise", analysis.noise ? to_json(*analysis.noise) : Json()},
      {"variants", variants_of(analysis)},
      {"best_values", best_values_of(analysis)},
      {"group_sizes", to_json(analysis.group_sizes)},
      {"conclusions", conclusions(analysis)},
      {"claims", to_json(claims)},
      {"diagnostics", diagnostics_of(results)},
      {"runs", runs_of(results, common)},
      {"problems", results.problems}};
  json.update(to_json(analysis.main));
  return json;
}

void replace_all(std::string& text, const std::string& from, const std::string& to) {
  for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size()) {
    text.replace(at, from.size(), to);
  }
}

std::string page_of(const Json& data) {
  std::string title = data["name"].get<std::string>();
  for (const auto& [from, to] : {std::pair{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}}) {
    replace_all(title, from, to);
  }
  std::string json = data.dump(-1, ' ', false, Json::error_handler_t::replace);
  replace_all(json, "</", "<\\/");  // so that nothing in it ends the script
  replace_all(json, "<!--", "<\\u0021--");
  // In pieces, since the title may contain anything.
  const std::string page = kReportPage, place = "@DATA@";
  const size_t at = page.find(place);
  std::string before = page.substr(0, at), after = page.substr(at + place.size());
  for (auto* part : {&before, &after}) replace_all(*part, "@TITLE@", title);
  return before + json + after;
}

}  // namespace

Report write_report(const Folder& folder, const std::string& out) {
  const auto results = read_results(folder);
  const auto analysis = analyze(folder, results);
  const auto claims = check_claims(folder, results, analysis);
  const Json data = to_json(folder, results, analysis, claims);
  train::make_folder(out);
  Report report;
  report.problems = results.problems;
  report.summary = to_text(analysis);
  const auto write = [&](const char* name, const std::string& text) {
    train::replace_file(out + "/" + name, text);
    report.files.push_back(out + "/" + name);
  };
  write("report.html", page_of(data));
  write("report.json", data.dump(1, ' ', false, Json::error_handler_t::replace) + "\n");
  write("table.md", to_markdown(folder, results, analysis, claims));
  write("table.csv", to_csv(analysis));
  write("table.tex", to_latex(analysis));
  write("differences.csv", differences_csv(analysis));
  return report;
}

}  // namespace study
