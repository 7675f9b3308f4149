#pragma once
// A study on disk: FOLDER/study.toml, data.json (a checksum of its data), and for every run a folder with what became of
// it: the trainer's files, log.txt, and result.json when it is finished or error.txt when it failed.

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

/// A study that is to be in a folder; nothing is looked at or written.
Folder planned_folder(const Study& study, const std::string& path);

/// Writes the study down in its folder, which may hold a part of it already. Refuses, by name, configurations that make
/// no sense and runs there that the study now says otherwise; what it adds is added.
void begin(const Folder& folder);

/// Runs in the folder that the study has no more.
std::vector<std::string> runs_without_plan(const Folder& folder);

/// Refuses values that no run could be made with, before any is begun.
void check_configs(const Folder& folder);

/// Refuses runs that the study now says otherwise.
void refuse_changes(const Folder& folder);

/// A checksum of the study's data; refuses what cannot be read.
uint32_t read_data(const Folder& folder);

/// Refuses data that is not what the study began with; notes what it is if it has not begun.
void check_data(const Folder& folder, uint32_t checksum);

std::string folder_of(const Folder& folder, const PlannedRun& run);

/// All that the study says about a run. `threads` and `device` are the worker's.
train::Config config_of(
    const Folder& folder, const PlannedRun& run, int64_t threads = 0,
    const std::string& device = "");

/// How a run that was begun is another than the study says, or "".
std::string difference_of(const Folder& folder, const PlannedRun& run);

enum class RunState { kWaiting, kRunning, kFinished, kFailed };

/// What became of a run so far.
struct RunStatus {
  RunState state = RunState::kWaiting;
  double fraction = 0;  // of its steps
  double loss = 0;      // validation loss after the last step, if it is finished
  std::string error;    // if it failed
};
RunStatus status_of(const Folder& folder, const PlannedRun& run);

/// The part of a run's steps that its record knows of, which can be behind by what is not written yet.
double fraction_done(const Folder& folder, const PlannedRun& run);

bool has_result(const std::string& run_folder);
void forget_result(const std::string& run_folder);
void record_result(const std::string& run_folder, double validation_loss);
/// On a full disk, too, it only says so: it should not hide the error itself.
void record_error(const std::string& run_folder, const std::string& error);
/// Empty if there is none.
std::string read_error(const std::string& run_folder);
void forget_error(const std::string& run_folder);

}  // namespace study
