#include "study/slurm.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <sys/wait.h>

#include <cstdio>
#include <filesystem>

#include "train/files.h"

namespace study {

std::string ranges_of(const std::vector<int64_t>& numbers) {
  std::string text;
  for (size_t i = 0; i < numbers.size();) {
    size_t end = i;
    while (end + 1 < numbers.size() && numbers[end + 1] == numbers[end] + 1) ++end;
    if (!text.empty()) text += ',';
    text += std::to_string(numbers[i]);
    if (end > i) text.append("-").append(std::to_string(numbers[end]));
    i = end + 1;
  }
  return text;
}

std::string slurm_script(
    const Folder& folder, const Workers& workers, int64_t at_once, const std::string& program,
    const std::string& options) {
  std::vector<int64_t> tasks;
  for (size_t i = 0; i < folder.plan.size(); ++i) {
    const auto state = status_of(folder, folder.plan[i]).state;
    if (state != RunState::kFinished) tasks.push_back(static_cast<int64_t>(i));
  }
  TORCH_CHECK_VALUE(!tasks.empty(), "all runs of the study in '", folder.path, "' are finished");
  const auto absolute = [](const std::string& path) {
    return std::filesystem::absolute(path).lexically_normal().string();
  };
  const std::string place = absolute(folder.path);
  for (const std::string& path : {place, absolute(program)}) {  // so that nothing needs quotes
    TORCH_CHECK_VALUE(
        path.find_first_of(" \t\n\"'\\$`%") == std::string::npos,
        "Slurm cannot work with the path '", path,
        "': it has blanks, quotes or other special signs");
  }
  TORCH_CHECK_VALUE(
      options.find('\n') == std::string::npos, "options for Slurm should be in one line");
  const bool cuda = workers.device == "cuda";
  return c10::str(
      "#!/bin/sh\n",                                                                  //
      "#SBATCH --job-name=", std::filesystem::path(place).filename().string(), "\n",  //
      "#SBATCH --array=", ranges_of(tasks), at_once > 0 ? c10::str("%", at_once) : "", "\n",
      "#SBATCH --cpus-per-task=", workers.threads, "\n", cuda ? "#SBATCH --gres=gpu:1\n" : "",
      // Two minutes before the time is over the run saves a checkpoint; submit again to go on.
      "#SBATCH --signal=B:TERM@120\n",                             //
      "#SBATCH --output=", place, "/slurm-%A_%a.log\n",            //
      options.empty() ? "" : c10::str("#SBATCH ", options, "\n"),  //
      "exec ", absolute(program), " study run ", place, " \"$SLURM_ARRAY_TASK_ID\" --threads ",
      workers.threads, cuda ? " --device cuda" : "", "\n");
}

std::string submit(const std::string& script) {
  const std::string command = "sbatch " + script + " 2>&1";  // its path has no special signs
  FILE* output = popen(command.c_str(), "r");
  TORCH_CHECK(output != nullptr, "cannot start sbatch");
  std::string text;
  char buffer[256];
  while (std::fgets(buffer, sizeof buffer, output) != nullptr) text += buffer;
  const int status = pclose(output);
  while (!text.empty() && text.back() == '\n') text.pop_back();
  TORCH_CHECK(
      WIFEXITED(status) && WEXITSTATUS(status) == 0, "sbatch did not take the job: ", text,
      ". The script is ", script);
  return text;
}

}  // namespace study
