#pragma once
// The training loop: batches → gradients → both optimizers → metrics, validations, checkpoints.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gpt/profile.h"
#include "train/config.h"
#include "train/files.h"

namespace train {

/// How far a run is.
struct Progress {
  double step = 0;      // steps done, a part of one too
  double fraction = 0;  // of the run; of the validation while there is one
  bool validating = false;
  double loss = 0;  // of the last step
  double tokens_per_second = 0;
  double peak_fraction = 0;  // the model's arithmetic, as part of what a matrix product reaches
  double seconds_left = 0;
};

/// How a run tells what happens. All may be left empty.
struct Listener {
  std::function<void(const std::string& folder)> begin = {};
  std::function<void(const Progress&)> progress = {};  // often
  std::function<void(const Progress&)> step = {};      // after every step
  std::function<void(int64_t step, double loss)> validation = {};
  std::function<void(const std::string& path)> checkpoint = {};
  std::function<void(const std::string& text)> note = {};
  std::function<bool()> stop_wanted = {};  // asked often; true: save a checkpoint and return
};

struct Outcome {
  std::string folder = {};
  int64_t step = 0;
  bool stopped = false;  // before the last step
  double validation_loss = 0;
  std::string checkpoint = {};
  gpt::Profile profile = {};  // of this process' steps, without validations and checkpoints
  int64_t profiled_steps = 0;
  double profiled_seconds = 0;
};

/// A run on disk that can go on.
struct Run {
  Config config;                     // config.out is its folder
  std::string checkpoint;            // where it goes on from; empty: from the beginning
  std::vector<std::string> notes;    // what one should know
  std::shared_ptr<FolderLock> lock;  // it is ours alone
};

/// With what depends on the data, on other options or on the machine filled in, as a run will have it.
Config resolved(Config config);

/// What the run in a folder was begun with.
Config config_of_run(const std::string& folder);

/// What `config` leaves open (0, auto), as the run that `found` is of has it.
Config filled_in(Config config, const Config& found);

/// Of all tokens, training and validation, or samples of them where they are many.
uint32_t checksum_of_data(const Config& config);

/// The run in a folder, at its newest checkpoint, or at the given one if `path` is a checkpoint.
/// `options` may change what does not make it another run. Without a `lock` on the folder it takes one.
Run open_run(
    const std::string& path, const Options& options, std::shared_ptr<FolderLock> lock = nullptr);

/// A new run in config.out, which should not hold one already. Without a `lock` on the folder it takes one.
Outcome train(
    const Config& config, const Listener& listener, std::shared_ptr<FolderLock> lock = nullptr);

/// Goes on with a run as if it had never been stopped.
Outcome resume(const Run& run, const Listener& listener);

}  // namespace train
