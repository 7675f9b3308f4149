#pragma once
// Running a study: one run in this process, or all of them in processes of their own, some at a time.

#include <functional>
#include <string>

#include "study/workers.h"
#include "train/train.h"

namespace study {

/// What a process that runs one run ends with, besides 0: it is finished. Unknown is one that the study has no more.
constexpr int kRunFailed = 1, kRunElsewhere = 75, kRunUnknown = 76;

enum class RunEnd { kFinished, kStopped, kElsewhere, kFailedBefore };

/// Runs one here, or goes on with it. A finished one is left as it is, and so are one that another process is at and,
/// unless `retry`, one that has failed or whose result cannot be read. An error is kept beside the run before it is
/// thrown on.
RunEnd run_here(
    const Folder& folder, const PlannedRun& run, int64_t threads, const std::string& device,
    bool retry, const train::Listener& listener);

/// How far the study is.
struct StudyProgress {
  int64_t planned = 0, finished = 0, running = 0, failed = 0;
  double fraction =
      0;  // of all steps of all runs, weighed by their tokens; failed runs count as done
  double seconds_left = 0;   // 0: not known yet
  std::string best_setting;  // lowest mean loss so far, of those with the most seeds; empty: none
  double best_loss = 0;
  int64_t best_seeds = 0;
};

struct StudyListener {
  std::function<void(const StudyProgress&)> progress = {};  // several times a second
  std::function<void(const PlannedRun&)> begin = {};
  std::function<void(const PlannedRun&, double loss, double seconds)> finished = {};
  std::function<void(const PlannedRun&, const std::string& error)> failed = {};
  std::function<int()> stop_signal = {};  // other than 0: runs save a checkpoint and stop
};

/// Runs all that is not finished, each as `group-muon study run FOLDER RUN` by this same program, and waits for runs
/// that other processes are at; if those die, they are taken over. Failed ones are left alone unless `retry`, which
/// tries them once. Runs stop, with a checkpoint, when this process is stopped or dies.
StudyProgress run_all(
    const Folder& folder, const Workers& workers, bool retry, const StudyListener& listener);

}  // namespace study
