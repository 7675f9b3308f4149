#include "study/folder.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <sstream>

#include "train/errors.h"
#include "train/files.h"
#include "train/json.h"
#include "train/recipe.h"
#include "train/run.h"

namespace study {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr const char* kResult = "/result.json";
constexpr const char* kError = "/error.txt";

// The text of a file, or "" if there is none. Another process may delete it at any time.
std::string text_if_any(const std::string& path) {
  if (!fs::exists(path)) return "";
  std::string text;
  try {
    text = train::read_text(path);
  } catch (const std::exception& error) {
    return fs::exists(path) ? train::message_of(error) : "";
  }
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

// Calls use(step, line) for the last lines of a run's metrics that can be read. The file may be growing.
template <typename Use>
void for_last_metrics(const std::string& run_folder, Use&& use) {
  constexpr int64_t kTail = 8192;  // a few lines
  const std::string path = run_folder + train::kMetricsFile;
  if (!fs::exists(path)) return;
  const gpt::InputFile file(path);
  const int64_t size = file.stamp().bytes, begin = std::max<int64_t>(0, size - kTail);
  std::string tail(static_cast<size_t>(size - begin), '\0');
  tail.resize(file.read_at(begin, tail.data(), tail.size()));
  std::istringstream lines(std::move(tail));
  for (std::string line; std::getline(lines, line);) {  // the first and last may be incomplete
    const auto json = train::parse_json(line);
    if (!json || !json->is_object() || !json->contains("step")) continue;
    if ((*json)["step"].is_number_integer()) use((*json)["step"].template get<int64_t>(), *json);
  }
}

// The loss of the last validation in a run's metrics, if it was after the last step.
std::optional<double> last_loss(const std::string& run_folder, int64_t steps) {
  std::optional<double> loss;
  for_last_metrics(run_folder, [&](int64_t step, const Json& line) {
    if (step != steps || !line.contains("validation_loss")) return;
    if (line["validation_loss"].is_number()) loss = line["validation_loss"].get<double>();
  });
  return loss;
}

// Throws if result.json does not hold what the run's metrics say: it alone would be believed whatever it says.
double checked_result(const std::string& run_folder, int64_t steps) {
  const auto result = train::parse_json(train::read_text(run_folder + kResult));
  TORCH_CHECK_VALUE(
      result && result->is_object() && result->contains("validation_loss") &&
          (*result)["validation_loss"].is_number(),
      "result.json cannot be read; use --retry to create it again");
  const double loss = (*result)["validation_loss"].get<double>();
  const auto measured = last_loss(run_folder, steps);
  TORCH_CHECK_VALUE(
      measured, "there is a result.json, but metrics.jsonl has no validation after step ", steps,
      "; use --retry to finish the run");
  TORCH_CHECK_VALUE(
      loss == *measured, "result.json says ", loss, " but metrics.jsonl says ", *measured,
      "; use --retry to create result.json again");
  return loss;
}

// Whoever writes the study's files holds this for a moment. Hundreds of workers may want it at once.
std::shared_ptr<train::FolderLock> lock_of(const Folder& folder) {
  constexpr double kPatience = 600;
  auto lock = train::wait_for_lock(folder.path, kPatience);
  if (!lock) {
    throw train::FolderBusy(
        c10::str(
            "another process has locked '", folder.path, "' for ", kPatience / 60, " minutes"));
  }
  return lock;
}

// Finds folders with a run, at most `levels` deep. Does not look into runs, whose checkpoints come and go.
void find_runs(const fs::path& place, int levels, std::vector<std::string>& found) {
  for (const auto& name : train::names_in(place.string())) {
    const fs::path path = place / name;
    if (!fs::is_directory(path)) continue;
    if (train::has_run(path.string())) {
      found.push_back(path.string());
    } else if (levels > 1 && name != train::kCheckpointsFolder + 1) {
      find_runs(path, levels - 1, found);
    }
  }
}

}  // namespace

Folder open_folder(const std::string& path) {
  const std::string file = path + "/study.toml";
  TORCH_CHECK_VALUE(
      fs::exists(file), "'", path, "' contains no study (there is no study.toml); start one with ",
      "group-muon study FILE --data DATA --out FOLDER");
  return planned_folder(read_study(file), path);
}

Folder planned_folder(const Study& study, const std::string& path) {
  return {train::normal_path(path), study, make_plan(study)};
}

void check_configs(const Folder& folder) {
  for (const auto& run : folder.plan) {
    try {
      train::check(config_of(folder, run));
    } catch (const c10::Error& error) {
      TORCH_CHECK_VALUE(false, run.name, ": ", error.what_without_backtrace());
    }
  }
}

void refuse_changes(const Folder& folder) {
  std::string first;
  int64_t changed = 0;
  for (const auto& run : folder.plan) {
    const std::string what = difference_of(folder, run);
    if (!what.empty() && changed++ == 0) first = c10::str(run.name, ": ", what);
  }
  TORCH_CHECK_VALUE(
      changed == 0, "the study has changed since ", changed, changed == 1 ? " run" : " runs",
      " in '", folder.path, "' started: ", first,
      ". Choose another --out, or delete the folders of these runs to run them again");
}

void begin(const Folder& folder) {
  check_configs(folder);
  refuse_changes(folder);
  train::make_folder(folder.path);
  const std::string file = folder.path + "/study.toml", text = to_toml(folder.study);
  const auto is_written = [&] { return fs::exists(file) && train::read_text(file) == text; };
  if (is_written()) return;  // files are replaced whole, so reading needs no lock
  const auto lock = lock_of(folder);
  if (!is_written()) train::replace_file(file, text);
}

std::vector<std::string> runs_without_plan(const Folder& folder) {
  std::vector<std::string> names;
  if (fs::is_directory(folder.path)) find_runs(folder.path, 3, names);
  const auto is_planned = [&](const std::string& path) {
    const auto has_it = [&](const PlannedRun& run) { return folder_of(folder, run) == path; };
    return std::any_of(folder.plan.begin(), folder.plan.end(), has_it);
  };
  names.erase(std::remove_if(names.begin(), names.end(), is_planned), names.end());
  for (auto& name : names) name = fs::path(name).lexically_relative(folder.path).string();
  std::sort(names.begin(), names.end());
  return names;
}

uint32_t read_data(const Folder& folder) {
  return train::checksum_of_data(config_of(folder, folder.plan.front()));
}

void check_data(const Folder& folder, uint32_t checksum) {
  const std::string file = folder.path + "/data.json";
  if (!fs::exists(file)) {  // else reading needs no lock, since files are replaced whole
    const auto lock = lock_of(folder);
    if (!fs::exists(file)) train::replace_file(file, Json{{"checksum", checksum}}.dump() + "\n");
  }
  const auto known = train::read_json(file);
  TORCH_CHECK_VALUE(
      known.contains("checksum") && known["checksum"] == checksum, "the data in '",
      folder.study.data, "' is not the data the study in '", folder.path,
      "' started with. Choose another --out");
}

std::string folder_of(const Folder& folder, const PlannedRun& run) {
  return folder.path + "/" + run.name;
}

train::Config config_of(
    const Folder& folder, const PlannedRun& run, int64_t threads, const std::string& device) {
  auto options = run.options;
  options.emplace_back("data", folder.study.data.empty() ? "data" : folder.study.data);
  options.emplace_back("out", folder_of(folder, run));
  options.emplace_back("threads", std::to_string(threads));
  if (!device.empty()) options.emplace_back("device", device);
  return train::configure(options);
}

std::string difference_of(const Folder& folder, const PlannedRun& run) {
  const std::string path = folder_of(folder, run);
  if (!train::has_run(path)) return "";
  try {
    const auto found = train::config_of_run(path);
    auto planned = train::filled_in(config_of(folder, run), found);
    planned.out = found.out;
    train::compare_for_resume(found, planned);
  } catch (const std::exception& error) {
    return train::message_of(error);
  }
  return "";
}

RunStatus status_of(const Folder& folder, const PlannedRun& run) {
  const std::string path = folder_of(folder, run);
  RunStatus status;
  if (!fs::exists(path)) return status;
  if (has_result(path)) {
    status.fraction = 1;
    try {
      status.loss = checked_result(path, train::configure(run.options).steps);
      status.state = RunState::kFinished;
    } catch (const std::exception& error) {
      status.state = RunState::kFailed;
      status.error = train::message_of(error);
    }
    return status;
  }
  status.fraction = fraction_done(folder, run);
  if (train::is_locked(path)) {
    status.state = RunState::kRunning;
  } else if (status.error = read_error(path); !status.error.empty()) {
    status.state = RunState::kFailed;
  }
  return status;
}

double fraction_done(const Folder& folder, const PlannedRun& run) {
  const auto steps = static_cast<double>(train::configure(run.options).steps);
  double done = 0;
  try {
    for_last_metrics(folder_of(folder, run), [&](int64_t step, const Json&) {
      done = static_cast<double>(step);
    });
  } catch (const std::exception&) {
    done = 0;  // only a progress bar depends on it; the run itself says what is wrong
  }
  return std::clamp(done / steps, 0.0, 1.0);
}

bool has_result(const std::string& run_folder) { return fs::exists(run_folder + kResult); }

void forget_result(const std::string& run_folder) { fs::remove(run_folder + kResult); }

void record_result(const std::string& run_folder, double validation_loss) {
  const Json result = {{"validation_loss", validation_loss}};
  train::replace_file(run_folder + kResult, result.dump() + "\n");
  forget_error(run_folder);
}

void record_error(const std::string& run_folder, const std::string& error) {
  try {
    train::replace_file(run_folder + kError, error + "\n");
  } catch (const std::exception& why) {
    std::fprintf(stderr, "%s\n(%s)\n", error.c_str(), train::message_of(why).c_str());
  }
}

std::string read_error(const std::string& run_folder) { return text_if_any(run_folder + kError); }

void forget_error(const std::string& run_folder) { fs::remove(run_folder + kError); }

}  // namespace study
