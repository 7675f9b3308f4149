#pragma once
// Runs a study: a single run in this process, or all runs in their own processes, some at a time.

#include <functional>
#include <string>

#include "study/workers.h"
#include "train/train.h"

namespace study {

/// Exit codes of `study run`: failed, another process is running it, the study does not have it. 0: finished.
constexpr int kRunFailed = 1, kRunElsewhere = 75, kRunUnknown = 76;

enum class RunEnd { kFinished, kStopped, kElsewhere, kFailedBefore };

/// Starts or resumes a run in this process. Skips a run that is finished or that another process is running. Without
/// `retry` it also skips a run that has failed or whose result cannot be read. An error is recorded in the run's
/// folder and rethrown, but for train::FolderBusy: the study's files were in use for minutes.
RunEnd run_here(
    const Folder& folder, const PlannedRun& run, int64_t threads, const std::string& device,
    bool retry, const train::Listener& listener);

/// Progress of a study.
struct StudyProgress {
  int64_t planned = 0, finished = 0, running = 0, failed = 0;
  double fraction = 0;  // fraction of all steps done, weighted by tokens; failed runs count as done
  double seconds_left = 0;   // 0: unknown
  std::string best_setting;  // lowest mean loss among settings with the most seeds; empty: none yet
  double best_loss = 0;
  int64_t best_seeds = 0;
};

struct StudyListener {
  std::function<void(const StudyProgress&)> progress = {};  // several times a second
  std::function<void(const PlannedRun&)> begin = {};
  std::function<void(const PlannedRun&, double loss, double seconds)> finished = {};
  std::function<void(const PlannedRun&, const std::string& error)> failed = {};
  std::function<int()> stop_signal = {};  // nonzero: runs save a checkpoint and stop
};

/// Runs everything that is not finished, each run as a process of this program with the words of `command`. Waits for runs of other
/// processes and takes them over if those die. Skips failed runs unless `retry`, which tries each once. Runs save a
/// checkpoint and stop when this process is stopped or dies.
StudyProgress run_all(
    const Folder& folder, const Workers& workers, const RunCommand& command, bool retry,
    const StudyListener& listener);

}  // namespace study
