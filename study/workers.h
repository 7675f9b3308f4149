#pragma once
// How many runs a machine takes at once.

#include <string>
#include <vector>

#include "study/folder.h"

namespace study {

/// How many at once, and on what.
struct Workers {
  int64_t jobs = 0;         // 0: one a core, as long as the memory is enough for all; one a GPU
  int64_t threads = 0;      // of each; 0: the cores, divided
  std::string device = {};  // empty: as the study says
};

/// With every 0 filled in for this machine.
Workers choose_workers(const Folder& folder, Workers workers);

/// CUDA_VISIBLE_DEVICES of each job: `visible` is that of this process, empty if it has none.
std::vector<std::string> gpus_of_jobs(const std::string& visible, int64_t gpus, int64_t jobs);

}  // namespace study
