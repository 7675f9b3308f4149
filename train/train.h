#pragma once
// The training loop: batches → gradients → optimizer → metrics, validations, checkpoints.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "gpt/profile.h"
#include "train/config.h"
#include "train/process_group.h"
#include "train/run.h"

namespace train {

/// Progress of a run.
struct Progress {
  double step = 0;      // steps done, including part of the current one
  double fraction = 0;  // fraction done of the run, or of the validation while validating
  bool validating = false;
  double loss = 0;  // loss of the last step
  double tokens_per_second = 0;
  double peak_fraction = 0;  // the model's FLOP/s as a fraction of a large matrix product's
  double seconds_left = 0;
};

/// Callbacks that report on a run. All are optional.
struct Listener {
  std::function<void(const std::string& folder)> begin = {};
  std::function<void(const Progress&)> progress = {};  // called often
  std::function<void(const Progress&)> step = {};      // after every step
  std::function<void(int64_t step, double loss)> validation = {};
  std::function<void(const std::string& path)> checkpoint = {};
  std::function<void(const std::string& text)> note = {};
  std::function<bool()> stop_wanted = {};  // called often; true: save a checkpoint and return
};

struct Outcome {
  std::string folder = {};
  int64_t step = 0;
  bool stopped = false;  // stopped before the last step
  double validation_loss = 0;
  std::string checkpoint = {};
  gpt::Profile profile = {};  // this process's steps, without validations and checkpoints
  int64_t profiled_steps = 0;
  double profiled_seconds = 0;
};

/// Starts a new run in config.out, which must not contain one. Locks the folder unless a `lock` is given. If several
/// `processes` train, all of them call this, with the first one's config: each computes the gradients of its part of
/// every batch, they share the optimizer's steps, and the first writes the files.
Outcome train(
    const Config& config, const Listener& listener, std::shared_ptr<FolderLock> lock = nullptr,
    const Processes& processes = {});

/// Resumes a run as if it had never been stopped. The number of processes may be another one.
Outcome resume(const Run& run, const Listener& listener, const Processes& processes = {});

/// Collective. What the first process prepares, on all of them: its run, without the lock. If it fails, all do. Also
/// refuses processes of another build.
Run prepared_by_first(const Processes& processes, const std::function<Run()>& prepare);

}  // namespace train
