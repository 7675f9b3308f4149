#include "study/folder.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "train/files.h"
#include "train/train.h"

namespace study {
namespace {

namespace fs = std::filesystem;

// How the run in a folder is another than the planned one, or "". What the plan leaves open is as the run has it.
std::string difference(const std::string& run_folder, train::Config planned) {
  const train::Config found = train::config_of_run(run_folder);
  planned.out = found.out;
  planned.threads = found.threads;
  if (planned.vocabulary == 0) planned.vocabulary = found.vocabulary;
  if (planned.micro_batch == 0) planned.micro_batch = found.micro_batch;
  if (planned.kernels == "auto") planned.kernels = found.kernels;
  if (planned.method == "auto") planned.method = found.method;
  try {
    train::compare_for_resume(found, planned);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

void refuse_changes(const Folder& folder) {
  std::string first;
  int64_t changed = 0;
  for (const auto& run : folder.plan) {
    const std::string path = folder_of(folder, run);
    if (!fs::exists(path + "/config.toml")) continue;
    const std::string what = difference(path, config_of(folder, run));
    if (what.empty()) continue;
    if (changed++ == 0) first = c10::str(run.name, ": ", what);
  }
  TORCH_CHECK_VALUE(
      changed == 0, "the study has changed since ", changed, changed == 1 ? " run" : " runs",
      " in '", folder.path, "' began: ", first,
      ". Give another --out, or delete what is to be run anew");
}

}  // namespace

Folder open_folder(const std::string& path) {
  const std::string file = path + "/study.toml";
  TORCH_CHECK_VALUE(
      fs::exists(file), "there is no study in '", path, "': it has no study.toml; begin one with ",
      "group-muon study FILE --data DATA --out FOLDER");
  Folder folder{train::normal_path(path), read_study(file), {}};
  folder.plan = make_plan(folder.study);
  return folder;
}

Folder make_folder(const Study& study, const std::string& path) {
  Folder folder{train::normal_path(path), study, make_plan(study)};
  const std::string file = folder.path + "/study.toml", text = to_toml(study);
  const auto is_same = [&] { return fs::exists(file) && train::read_text(file) == text; };
  if (is_same()) return folder;
  refuse_changes(folder);
  train::make_folder(folder.path);
  const auto lock = train::wait_for_lock(folder.path, 10);  // another worker may begin, too
  TORCH_CHECK(lock, "another process has locked '", folder.path, "'");
  if (!is_same()) train::replace_file(file, text);
  return folder;
}

std::string folder_of(const Folder& folder, const PlannedRun& run) {
  return folder.path + "/" + run.name;
}

train::Config config_of(
    const Folder& folder, const PlannedRun& run, int64_t threads, const std::string& device) {
  auto options = run.options;
  options.emplace_back("data", folder.study.data);
  options.emplace_back("out", folder_of(folder, run));
  options.emplace_back("threads", std::to_string(threads));
  if (!device.empty()) options.emplace_back("device", device);
  return train::configure(options);
}

RunStatus status_of(const Folder& folder, const PlannedRun& run) {
  const std::string path = folder_of(folder, run);
  RunStatus status;
  if (!fs::exists(path)) return status;
  if (const std::string file = path + "/result.json"; fs::exists(file)) {
    const auto result = nlohmann::json::parse(train::read_text(file), nullptr, false);
    TORCH_CHECK(
        result.is_object() && result.contains("validation_loss"), "'", file, "' cannot be read");
    status.state = RunState::kFinished;
    status.fraction = 1;
    status.loss = result["validation_loss"].get<double>();
    return status;
  }
  status.fraction = static_cast<double>(steps_done(path)) /
                    static_cast<double>(train::configure(run.options).steps);
  if (is_locked(path)) {
    status.state = RunState::kRunning;
  } else if (fs::exists(path + "/error.txt")) {
    status.state = RunState::kFailed;
    status.error = train::read_text(path + "/error.txt");
    while (!status.error.empty() && status.error.back() == '\n') status.error.pop_back();
  }
  return status;
}

bool is_locked(const std::string& run_folder) {
  try {
    const train::FolderLock lock(run_folder);
    return false;
  } catch (const train::FolderBusy&) {
    return true;
  }
}

int64_t steps_done(const std::string& run_folder) {
  constexpr std::streamoff kTail = 8192;  // several lines
  std::ifstream file(run_folder + "/metrics.jsonl", std::ios::binary | std::ios::ate);
  if (!file) return 0;
  const std::streamoff size = file.tellg();
  file.seekg(std::max<std::streamoff>(0, size - kTail));
  std::string line;
  int64_t steps = 0;
  while (std::getline(file, line)) {
    const auto json = nlohmann::json::parse(line, nullptr, false);  // the first and last may be cut
    if (json.is_object() && json.contains("step")) steps = json["step"].get<int64_t>();
  }
  return steps;
}

void record_result(const std::string& run_folder, double validation_loss) {
  const nlohmann::json result = {{"validation_loss", validation_loss}};
  train::replace_file(run_folder + "/result.json", result.dump() + "\n");
  fs::remove(run_folder + "/error.txt");
}

void record_error(const std::string& run_folder, const std::string& error) {
  train::replace_file(run_folder + "/error.txt", error + "\n");
}

}  // namespace study
