#pragma once
// How many runs a machine executes in parallel.

#include <string>
#include <vector>

#include "study/folder.h"

namespace study {

/// How runs are executed.
struct Workers {
  int64_t jobs = 0;         // runs at a time; 0: one per core if memory allows, or one per GPU
  int64_t threads = 0;      // threads per run; 0: the cores divided among the jobs
  std::string device = {};  // empty: the study's
};

/// Returns the command line for one run of the study. The first word is the program. Without `retry` the command skips
/// a run that has failed before.
using RunCommand = std::function<std::vector<std::string>(const std::string& run, bool retry)>;

/// Replaces every 0 by a value for this machine.
Workers choose_workers(const Folder& folder, Workers workers);

/// CUDA_VISIBLE_DEVICES for each job. `visible` is the value in this process, empty if it is not set.
std::vector<std::string> gpus_of_jobs(const std::string& visible, int64_t gpus, int64_t jobs);

}  // namespace study
