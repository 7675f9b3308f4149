#pragma once
// Checkpoints: RUN/checkpoints/step-000125 with model.safetensors, optimizer.safetensors, state.json.
// A folder with that name is complete: it is written under another name, synced, then renamed. state.json has the
// checksums of the other files and its own. The step is in the folder's name and in all three files.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "gpt/model.h"
#include "group_muon/assemble.h"
#include "train/config.h"

namespace train {

/// The trainer's state, without weights and momentum.
struct TrainerState {
  int64_t step = 0;                            // steps done
  double seconds = 0;                          // training time of these steps
  std::optional<double> validation_loss = {};  // at this step, if measured
  int64_t training_tokens = 0;                 // size of the training data, to recognize it
  uint32_t data_crc = 0;                       // checksum of the data
  Options config = {};                         // the run's; empty in checkpoints of older versions
};

/// Writes a checkpoint of the run and returns its path. If processes share the optimizer's steps, `gathered` has its
/// states.
std::string save_checkpoint(
    const std::string& run, const gpt::Model& model, group_muon::GroupMuon& optimizer,
    const TrainerState& state, group_muon::ParamStates* gathered = nullptr);

/// The step in a checkpoint's name, "step-" followed by at least six digits; -1 for other names.
int64_t step_of(const std::string& path);

/// Paths of a run's checkpoints, oldest first.
std::vector<std::string> list_checkpoints(const std::string& run);

/// The checkpoint with the lowest validation loss, or "" if none has one.
std::string best_checkpoint(const std::vector<std::string>& checkpoints);

/// Deletes all checkpoints except the newest `keep` and the best, and partial ones left by a killed process.
void prune_checkpoints(const std::string& run, int64_t keep);

/// Renames checkpoints after `step` to set-aside-…, because the run diverges from them when resumed there.
void set_aside_later(const std::string& run, int64_t step);

/// Why a checkpoint, or only its weights, cannot be used (missing files, wrong sizes, checksums or steps); "" if it
/// can.
std::string damage(const std::string& checkpoint, bool weights_only = false);

/// The newest undamaged checkpoint of those given, or "".
std::string newest_whole(const std::vector<std::string>& checkpoints, bool weights_only = false);

/// Rejects a damaged checkpoint. The error suggests the newest intact one of the others, preceded by `offer`.
void require_whole(
    const std::string& checkpoint, const std::vector<std::string>& others, bool weights_only,
    const char* offer);

TrainerState read_state(const std::string& checkpoint);

/// Loads weights from a checkpoint that has been checked, or from a safetensors file.
void load_weights(const std::string& path, gpt::Model& model);

/// Loads the weights a run begins with: from a checkpoint, from a run's newest checkpoint, or from any safetensors file
/// with these names. Rejects damaged checkpoints, tensors that are missing, too many or of another shape, a head that
/// is not the embedding, and values that no weight has.
void load_initial_weights(const std::string& path, gpt::Model& model);

/// Loads weights, optimizer state and trainer state, so the run resumes as if never stopped.
TrainerState load_checkpoint(
    const std::string& checkpoint, gpt::Model& model, group_muon::GroupMuon& optimizer);

/// The tensors of the optimizer's state, in an order that depends on the model alone. Creates missing ones.
std::vector<torch::Tensor> tensors_of_state(
    const gpt::Model& model, group_muon::GroupMuon& optimizer);

/// Sets the number of steps that all states have seen.
void set_steps(group_muon::GroupMuon& optimizer, int64_t step);

}  // namespace train
