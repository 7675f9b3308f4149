#pragma once
// Checkpoints: RUN/checkpoints/step-000125 with model.safetensors, optimizer.safetensors, state.json.
// A folder of that name is whole: it is written under another name, synced, then renamed.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "gpt/model.h"
#include "group_muon/assemble.h"

namespace train {

/// What the trainer knows besides weights and momentum.
struct TrainerState {
  int64_t step = 0;                            // steps done
  double seconds = 0;                          // spent on them
  std::optional<double> validation_loss = {};  // at this step, if it was measured
  int64_t training_tokens = 0;                 // of the data, to know it again
  uint32_t data_crc = 0;
};

/// Writes a checkpoint of the run and returns its path.
std::string save_checkpoint(
    const std::string& run, const gpt::Model& model, group_muon::Optimizers& optimizers,
    const TrainerState& state);

/// A run's folder, and a checkpoint if one was named: RUN or RUN/checkpoints/step-000125.
struct Place {
  std::string run, checkpoint;
};
Place locate(const std::string& path);

/// Paths of a run's checkpoints, oldest first.
std::vector<std::string> list_checkpoints(const std::string& run);

/// The one with the lowest validation loss, or "" where none has one.
std::string best_checkpoint(const std::vector<std::string>& checkpoints);

/// Deletes all but the newest `keep` and the best, and what a killed process left half done.
void prune_checkpoints(const std::string& run, int64_t keep);

/// Renames checkpoints of later steps than `step` to set-aside-…: the run takes another path from there.
void set_aside_later(const std::string& run, int64_t step);

/// Why a checkpoint, or only its weights, cannot be used (missing files, other sizes or checksums);
/// "" if it can.
std::string damage(const std::string& checkpoint, bool weights_only = false);

/// The newest checkpoint that is not damaged, of those given, or "".
std::string newest_whole(const std::vector<std::string>& checkpoints, bool weights_only = false);

/// Refuses a damaged checkpoint, and offers the newest of the others that is whole, after `offer`.
void require_whole(
    const std::string& checkpoint, const std::vector<std::string>& others, bool weights_only,
    const char* offer);

TrainerState read_state(const std::string& checkpoint);

/// Weights of a checkpoint, of a run's newest one, or of any safetensors file with these names.
void load_weights(const std::string& path, gpt::Model& model);

/// Weights, momentum and all: the run goes on as if never stopped.
TrainerState load_checkpoint(
    const std::string& checkpoint, gpt::Model& model, group_muon::Optimizers& optimizers);

}  // namespace train
