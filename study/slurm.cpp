#include "study/slurm.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <sstream>

#include "study/process.h"

namespace study {
namespace {

std::string absolute(const std::string& path) {
  return std::filesystem::absolute(path).lexically_normal().string();
}

// Rejects paths that would need quoting in the shell or in Slurm's patterns.
void check_path(const std::string& path) {
  const auto plain = [](unsigned char c) {
    return std::isalnum(c) != 0 || std::strchr("/._+=@,-", c) != nullptr || c >= 0x80;
  };
  TORCH_CHECK_VALUE(
      std::all_of(path.begin(), path.end(), plain), "Slurm scripts cannot use the path '", path,
      "': it has spaces, quotes or other special characters; choose a path without them");
}

}  // namespace

std::string slurm_script(
    const Folder& folder, const Workers& workers, const RunCommand& command, bool retry,
    const std::string& options) {
  std::ostringstream names;
  int64_t tasks = 0;
  for (const auto& run : folder.plan) {
    const auto state = status_of(folder, run).state;
    if (state == RunState::kFinished || (state == RunState::kFailed && !retry)) continue;
    names << " \\\n  " << run.name;
    ++tasks;
  }
  TORCH_CHECK_VALUE(
      tasks > 0, "all runs of the study in '", folder.path, "' are finished or have failed");
  const std::string place = absolute(folder.path);
  check_path(place);
  const std::string run = "\"$1\"";
  std::string line;
  for (const auto& word : command(run, /*retry=*/true)) {
    if (word != run) check_path(word);
    line += " " + word;
  }
  TORCH_CHECK_VALUE(options.find('\n') == std::string::npos, "--slurm-options should be one line");
  const bool cuda = workers.device == "cuda";
  std::ostringstream script;
  script << "#!/bin/sh\n"
         << "#SBATCH --job-name=" << std::filesystem::path(place).filename().string() << "\n"
         << "#SBATCH --array=0-" << tasks - 1;
  if (workers.jobs > 0) script << "%" << workers.jobs;
  script << "\n#SBATCH --cpus-per-task=" << workers.threads << "\n";
  if (cuda) script << "#SBATCH --gres=gpu:1\n";
  script
      << "# A run saves a checkpoint two minutes before its time limit; submit again to resume.\n"
      << "#SBATCH --signal=B:TERM@120\n"
      << "#SBATCH --output=" << place << "/slurm-%A_%a.log\n";
  if (!options.empty()) script << "#SBATCH " << options << "\n";
  script << "set --" << names.str() << "\n"
         << "shift \"$SLURM_ARRAY_TASK_ID\"\n"
         << "exec" << line << "\n";
  return script.str();
}

std::string submit(const std::string& script) {
  std::string text;
  const int code = run_program({"sbatch", script}, &text);
  while (!text.empty() && text.back() == '\n') text.pop_back();
  TORCH_CHECK(code == 0, "sbatch rejected the job: ", text, ". The script is ", script);
  return text;
}

}  // namespace study
