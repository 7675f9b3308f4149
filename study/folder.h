#pragma once
// A study on disk: FOLDER/study.toml, and for every run a folder with what became of it: the trainer's files, log.txt,
// and result.json when it is finished or error.txt when it failed.

#include <string>
#include <vector>

#include "study/plan.h"

namespace study {

struct Folder {
  std::string path;
  Study study;
  std::vector<PlannedRun> plan;
};

/// The study in a folder.
Folder open_folder(const std::string& path);

/// The study of a file in a folder, which may hold a part of it already. Refuses, by name, runs there that the file now
/// says otherwise; what the file adds is added.
Folder make_folder(const Study& study, const std::string& path);

std::string folder_of(const Folder& folder, const PlannedRun& run);

/// All that the study says about a run. `threads` and `device` are the worker's.
train::Config config_of(
    const Folder& folder, const PlannedRun& run, int64_t threads = 0,
    const std::string& device = "");

enum class RunState { kWaiting, kRunning, kFinished, kFailed };

/// What became of a run so far.
struct RunStatus {
  RunState state = RunState::kWaiting;
  double fraction = 0;  // of its steps
  double loss = 0;      // validation loss after the last step, if it is finished
  std::string error;    // if it failed
};
RunStatus status_of(const Folder& folder, const PlannedRun& run);

/// Whether another process is at work in a run's folder.
bool is_locked(const std::string& run_folder);

/// Steps that a run's record knows of, which can be behind by what is not written yet.
int64_t steps_done(const std::string& run_folder);

void record_result(const std::string& run_folder, double validation_loss);
void record_error(const std::string& run_folder, const std::string& error);

}  // namespace study
