#pragma once
// A run on disk: starting it, opening it, checking it, resuming it and refusing it. The trainer, `analyze`, `sample`
// and studies all open runs here.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gpt/shards.h"
#include "train/checkpoint.h"
#include "train/config.h"
#include "train/files.h"
#include "train/run_files.h"

namespace train {

/// A run's folder, and a checkpoint if the path names one: RUN or RUN/checkpoints/step-000125.
struct Place {
  std::string run, checkpoint;
};
Place locate(const std::string& path);

/// Whether a run has started in the folder.
bool has_run(const std::string& folder);

/// The config as a run will use it, with everything filled in that depends on the data, other options or the machine.
Config resolved(Config config);

/// The config of the run in a folder. Rejects a config.toml that lacks keys or was changed by hand, and names the
/// keys. Runs of older versions have no checksum and lack newer keys, which then mean what they meant to that version.
Config config_of_run(const std::string& folder);

/// Fills the open values of `config` (0, auto) with those of `found`, the config of an existing run.
Config filled_in(Config config, const Config& found);

/// Checksum of the training tokens and the first `validation_tokens` of the others. Large data is sampled. Reading
/// them also finds tokens outside the vocabulary.
uint32_t fingerprint(
    const gpt::TokenStream& training, const gpt::TokenStream& validation,
    int64_t validation_tokens);
/// The same for all data of a config.
uint32_t checksum_of_data(const Config& config);

/// Which checkpoint of a run to read, and how much of it.
struct ReadOptions {
  bool best = false;          // the lowest validation loss; else the newest
  bool weights_only = false;  // the optimizer's state is not needed
  const char* offer =
      "use ";  // what precedes the path of an intact checkpoint, if the wanted one is damaged
};

/// A run and one of its checkpoints. Both are intact and belong together.
struct SavedRun {
  Config config;           // config.out is the run's folder
  std::string checkpoint;  // empty: the run has none yet
  TrainerState state;      // at the checkpoint
};

/// Reads the run at `path`: a run, or one of its checkpoints.
SavedRun read_run(const std::string& path, const ReadOptions& options = {});

/// The same for commands that need a checkpoint.
SavedRun read_trained_run(const std::string& path, const ReadOptions& options = {});

/// A run to train in this process.
struct Run {
  Config config;                     // config.out is the run's folder
  std::string checkpoint;            // checkpoint to resume from; empty: start from the beginning
  TrainerState state;                // at the checkpoint
  std::vector<std::string> notes;    // notes for the user
  std::shared_ptr<FolderLock> lock;  // keeps other processes out
};

/// Rejects a folder that contains a run or parts of one.
void refuse_existing(const std::string& folder);

/// Creates a new run in config.out, which must not contain one. Locks the folder unless a `lock` is given. `processes`
/// train it.
Run begin_run(const Config& config, std::shared_ptr<FolderLock> lock = nullptr, int processes = 1);

/// Opens a run for resuming. `path` is a run (resumes from its newest checkpoint) or a checkpoint. `options` may only
/// change what does not make it a different run. Locks the folder unless a `lock` is given. Changes no file.
Run open_run(
    const std::string& path, const Options& options, std::shared_ptr<FolderLock> lock = nullptr);

/// Takes over a run that was opened and whose data has been checked: sets later checkpoints aside, and records changed
/// options and this machine.
void take_over(const Run& run, int processes = 1);

}  // namespace train
