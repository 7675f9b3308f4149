#pragma once
// A study on disk: FOLDER/study.toml, data.json (a checksum of its data) and one folder per run. A run's folder has
// the trainer's files, log.txt, and result.json if the run is finished or error.txt if it failed.

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

/// A study as it would be in a folder. Does not read or write anything.
Folder planned_folder(const Study& study, const std::string& path);

/// Writes the study to its folder, which may already contain some of its runs; new runs are added to them. Rejects
/// invalid configurations and existing runs that differ from the study, and names them.
void begin(const Folder& folder);

/// Runs in the folder that are no longer in the study.
std::vector<std::string> runs_without_plan(const Folder& folder);

/// Rejects configurations that cannot be run, before any run starts.
void check_configs(const Folder& folder);

/// Rejects a study that differs from runs already started.
void refuse_changes(const Folder& folder);

/// A checksum of the study's data. Fails if the data cannot be read.
uint32_t read_data(const Folder& folder);

/// Rejects data other than what the study started with. Records the checksum if the study has not started.
void check_data(const Folder& folder, uint32_t checksum);

std::string folder_of(const Folder& folder, const PlannedRun& run);

/// The configuration of a run. `threads` and `device` come from the worker.
train::Config config_of(
    const Folder& folder, const PlannedRun& run, int64_t threads = 0,
    const std::string& device = "");

/// How a started run differs from the study, or "".
std::string difference_of(const Folder& folder, const PlannedRun& run);

enum class RunState { kWaiting, kRunning, kFinished, kFailed };

/// The state of a run.
struct RunStatus {
  RunState state = RunState::kWaiting;
  double fraction = 0;  // fraction of its steps that are done
  double loss = 0;      // validation loss after the last step, if finished
  std::string error;    // why it failed
};
RunStatus status_of(const Folder& folder, const PlannedRun& run);

/// The fraction of a run's steps in its metrics file, which may lag behind the run.
double fraction_done(const Folder& folder, const PlannedRun& run);

bool has_result(const std::string& run_folder);
void forget_result(const std::string& run_folder);
void record_result(const std::string& run_folder, double validation_loss);
/// Never throws, even on a full disk: prints the error instead, so that it is not lost.
void record_error(const std::string& run_folder, const std::string& error);
/// Empty if there is none.
std::string read_error(const std::string& run_folder);
void forget_error(const std::string& run_folder);

}  // namespace study
