#include "study/results.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <cmath>
#include <filesystem>
#include <functional>
#include <set>
#include <sstream>
#include <tuple>

#include "train/errors.h"
#include "train/files.h"
#include "train/json.h"
#include "train/run.h"

namespace study {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// Calls `use` for every line of a JSON Lines file, whose last line must be complete.
void for_lines(const std::string& path, const std::function<void(const Json&)>& use) {
  const std::string text = train::read_text(path);
  const std::string name = fs::path(path).filename().string();
  TORCH_CHECK_VALUE(!text.empty() && text.back() == '\n', name, " is truncated");
  std::istringstream lines(text);
  int64_t number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    const auto json = train::parse_json(line);
    TORCH_CHECK_VALUE(
        json && json->is_object() && json->contains("step") && (*json)["step"].is_number_integer(),
        name, ", line ", number, " cannot be read");
    try {
      use(*json);
    } catch (const nlohmann::json::exception&) {
      TORCH_CHECK_VALUE(false, name, ", line ", number, " has missing or wrong values");
    }
  }
}

void read_metrics(const std::string& folder, const train::Config& config, RunResult& result) {
  double optimizer = 0;
  int64_t steps = 0;
  for_lines(folder + train::kMetricsFile, [&](const Json& line) {
    const auto step = line["step"].get<int64_t>();
    if (line.contains("validation_loss")) {
      const auto loss = line["validation_loss"].get<double>();
      TORCH_CHECK_VALUE(std::isfinite(loss), "the validation loss at step ", step, " is ", loss);
      result.curve[step] = loss;
      for (const auto& [key, field] :
           {std::pair{"engine", "engine"}, {"muon-engine", "muon_engine"}}) {
        if (line.contains(field)) result.engines[key].insert(line[field].get<std::string>());
      }
      return;
    }
    TORCH_CHECK_VALUE(step == ++steps, "metrics.jsonl jumps from step ", steps - 1, " to ", step);
    result.seconds = line.at("seconds").get<double>();
    optimizer += line.value("optimizer_seconds", kUnknown);
  });
  TORCH_CHECK_VALUE(
      steps == config.steps && result.curve.count(steps) == 1, "metrics.jsonl ends at step ", steps,
      " of ", config.steps);
  TORCH_CHECK_VALUE(
      result.curve[steps] == result.loss, "result.json says ", result.loss,
      " but metrics.jsonl says ", result.curve[steps]);
  result.tokens_per_second =
      static_cast<double>(config.steps * config.batch * config.context) / result.seconds;
  result.optimizer_share = optimizer / result.seconds;
}

// Sums from which means are computed.
struct Sums {
  double count = 0, rank = 0, machine_rank = 0, norm = 0, gain = 0, first_order = 0, cost = 0;
};

using SeriesKey = std::pair<std::string, std::string>;  // of, grouping

DiagnosticSeries means_of(
    const SeriesKey& key, const std::map<int64_t, Sums>& by_step, double larger) {
  DiagnosticSeries series{key.first, key.second, {}, {}, {}, {}, {}, {}, {}, 0};
  double count = 0;
  for (const auto& [step, sum] : by_step) {
    series.steps.push_back(step);
    series.rank_ratio.push_back(sum.rank / sum.count);
    series.rank_ratio_machine.push_back(sum.machine_rank / sum.count);
    series.squared_norm_ratio.push_back(sum.norm / sum.count);
    series.gain.push_back(sum.gain / sum.count);
    series.first_order_gain.push_back(sum.first_order / sum.count);
    series.norm_cost.push_back(sum.cost / sum.count);
    count += sum.count;
  }
  series.larger_norms = larger / count;
  return series;
}

// Adds a line to its sums. `whole` is the line of the same matrix as one block.
void add(const Json& line, const Json& whole, Sums& sum) {
  const double rows = line.at("rows"), columns = line.at("cols");
  const auto more = [&](const char* name) {  // relative difference to the whole matrix
    const double base = whole.at(name);
    return base != 0 ? (line.at(name).get<double>() - base) / base : 0;
  };
  sum.count += 1;
  sum.rank += line.at("ranks").at(1).get<double>() / rows;
  sum.machine_rank += line.at("ranks").at(3).get<double>() / rows;
  sum.norm += line.at("squared_norm").get<double>() / std::min(rows, columns);
  sum.gain += more("nuclear_norm");
  sum.first_order += more("first_order");
  sum.cost += more("squared_norm");
}

std::vector<DiagnosticSeries> read_diagnostics(const std::string& path) {
  using Matrix = std::tuple<int64_t, std::string, std::string, std::string>;
  std::vector<Json> lines;
  std::map<Matrix, Json> whole;
  const auto matrix_of = [](const Json& line) {
    return Matrix{line["step"], line.at("weight"), line.at("part"), line.at("of")};
  };
  for_lines(path, [&](const Json& line) {
    const auto part = line.at("part").get<std::string>();
    if ((part != "q" && part != "k") || line.at("grouping") == "packed") return;
    if (line.at("grouping") == "three-way") whole[matrix_of(line)] = line;
    lines.push_back(line);
  });
  std::vector<SeriesKey> order;
  std::map<SeriesKey, std::map<int64_t, Sums>> sums;
  std::map<SeriesKey, double> larger;
  for (const auto& line : lines) {
    const SeriesKey key = {line.at("of"), line.at("grouping")};
    const auto own = whole.find(matrix_of(line));
    TORCH_CHECK_VALUE(own != whole.end(), "there are no lines for the whole matrices");
    if (sums.count(key) == 0) order.push_back(key);
    add(line, own->second, sums[key][line["step"]]);
    larger[key] += line.at("squared_norm") > own->second.at("squared_norm") ? 1 : 0;
  }
  std::vector<DiagnosticSeries> all;
  for (const auto& key : order) all.push_back(means_of(key, sums[key], larger[key]));
  return all;
}

// Errors here only become problems: the run's loss is still valid.
void add_diagnostics(
    const std::string& path, RunResult& result, std::vector<std::string>& problems) {
  if (!fs::exists(path)) return;
  try {
    result.diagnostics = read_diagnostics(path);
  } catch (const std::exception& error) {
    problems.push_back(result.run.name + ": diagnostics.jsonl: " + train::message_of(error));
  }
}

// Names of runs by the value of one property.
using Mixture = std::map<std::string, std::set<std::string>>;

// "avx512_bf16 (31 runs), avx2 (packed/seed-0, packed/seed-1)": runs with the most common value are only counted.
void note_mixture(const std::string& key, const Mixture& found, Results& results) {
  constexpr size_t kNamed = 5;
  if (found.size() < 2) return;
  const auto common = std::max_element(
      found.begin(), found.end(),
      [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
  std::string list;
  for (const auto& [value, runs] : found) {
    std::string names;
    size_t named = 0;
    for (const auto& run : runs) {
      if (named++ == kNamed) break;
      names += (names.empty() ? "" : ", ") + run;
    }
    if (runs.size() > kNamed) names += ", …";
    if (value == common->first) {
      names = c10::str(runs.size(), runs.size() == 1 ? " run" : " runs");
    }
    list += c10::str(list.empty() ? "" : ", ", value, " (", names, ")");
  }
  results.problems.push_back(c10::str("runs differ in ", key, ": ", list));
}

// Runs of one study should also agree in everything that depends on the machine and the program.
void note_mixtures(Results& results) {
  for (const char* key : {"commit", "torch", "processor", "cpu_capability"}) {
    Mixture found;
    for (const auto& result : results.runs) {
      if (!result.counts()) continue;
      for (const auto& machine : result.machines) {
        if (machine.contains(key) && machine[key].is_string()) {
          found[machine[key]].insert(result.run.name);
        }
      }
    }
    note_mixture(key, found, results);
  }
  for (const char* key :
       {"precision", "muon-precision", "validation-precision", "engine", "muon-engine", "method",
        "threads", "device"}) {
    std::map<std::string, Mixture> values;  // by what was planned
    for (const auto& result : results.runs) {
      if (!result.counts()) continue;
      const auto planned = train::configure(result.run.options);
      auto& mixture = values[train::get(planned, train::find_key(key))];
      std::set<std::string> found = {result.config.at(key)};
      if (const auto seen = result.engines.find(key); seen != result.engines.end()) {
        found.insert(seen->second.begin(), seen->second.end());
      }
      for (const auto& value : found) mixture[value].insert(result.run.name);
    }
    for (const auto& [planned, found] : values) note_mixture(key, found, results);
  }
}

void read_run(const std::string& folder, RunResult& result) {
  const auto config = train::config_of_run(folder);
  for (const auto& key : train::config_keys()) result.config[key.name] = train::get(config, key);
  // Paths on that machine mean nothing elsewhere.
  result.config.erase("out");
  result.config["data"] = fs::path(config.data).filename().string();
  const std::string machines = folder + train::kMachineFile;
  std::istringstream lines(fs::exists(machines) ? train::read_text(machines) : "");
  for (std::string line; std::getline(lines, line);) {
    auto machine = train::parse_json(line);
    if (machine && machine->is_object()) result.machines.push_back(std::move(*machine));
  }
  if (result.state != RunState::kFinished) return;
  read_metrics(folder, config, result);
}

}  // namespace

Results read_results(const Folder& folder) {
  Results results;
  for (const auto& run : folder.plan) {
    RunResult result;
    result.run = run;
    const std::string path = folder_of(folder, run);
    const auto complain = [&](const std::string& why) {
      result.readable = false;
      result.error = why;
      results.problems.push_back(run.name + ": " + why + "; the run is left out");
    };
    try {
      const auto status = status_of(folder, run);
      result.state = status.state;
      result.error = status.error;
      const bool damaged = status.state == RunState::kFailed && has_result(path);
      TORCH_CHECK_VALUE(!damaged, status.error);
      if (status.state == RunState::kFinished) {
        result.loss = status.loss;
        TORCH_CHECK_VALUE(train::has_run(path), "config.toml is missing");
      }
      if (train::has_run(path)) {
        const std::string difference = difference_of(folder, run);
        TORCH_CHECK_VALUE(difference.empty(), "differs from the study: ", difference);
        read_run(path, result);
      }
    } catch (const std::exception& error) {
      complain(train::message_of(error));
    }
    if (result.counts()) add_diagnostics(path + train::kDiagnosticsFile, result, results.problems);
    results.runs.push_back(std::move(result));
  }
  note_mixtures(results);
  return results;
}

}  // namespace study
