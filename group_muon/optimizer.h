#pragma once
// GroupMuon as a libtorch optimizer: state and the usual interface around group_muon::step, and AdamW for other weights.

#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "group_muon/adamw.h"
#include "group_muon/exchange.h"
#include "group_muon/options.h"
#include "group_muon/step.h"

namespace group_muon {

struct GroupMuonParamState
    : public torch::optim::OptimizerCloneableParamState<GroupMuonParamState> {
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(torch::Tensor, momentum_buffer);

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

/// What the gradients are when several processes share a step.
enum class Gradients {
  kLocal,     // of each process's own batch: the step averages them
  kParts,     // of each process's part of one batch: the step adds them up
  kAveraged,  // averaged already, as by DistributedDataParallel
};

/// A gradient that this process steps with: of a weight, or of a piece that it owns.
struct OwnGradient {
  torch::Tensor weight;  // the whole weight
  torch::Tensor grad;    // may be changed in place
  /// Muon: pieces contain whole lines of the matrix along this axis. AdamW: none; pieces begin at multiples of 64 elements.
  std::optional<Axis> lines = {};
};

/// Steps groups with GroupMuonOptions by Group Muon and groups with torch::optim::AdamWOptions by AdamW, with one
/// zero_grad, one file and one scheduler for both.
class GroupMuon : public torch::optim::Optimizer {
 public:
  explicit GroupMuon(
      const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
      GroupMuonOptions defaults = {});
  explicit GroupMuon(std::vector<torch::Tensor> params, GroupMuonOptions defaults = {});

  /// Hides libtorch's version, which replaces the options of optimizers it does not know by the defaults.
  void add_param_group(  // NOLINT(bugprone-derived-method-shadowing-base-method): on purpose
      const torch::optim::OptimizerParamGroup& param_group);

  /// Changes the grouping from the next step on, for the segments with this name ("": all segments) in every
  /// parameter group that has one. Momentum is kept.
  void set_grouping(const GroupingSchedule& grouping, std::string_view segment);

  /// Shares all further steps between the processes of a group, which must have the same weights and options: each
  /// process keeps the state of its own pieces (sharing.h), computes their new values and sends them to all. States that
  /// exist are divided. Collective, like every step, gathered_states() and save() from then on. Call it after the last
  /// add_param_group().
  void share(ProcessGroup group, Gradients gradients = Gradients::kLocal);

  /// The exchange between processes, or nullptr if steps are not shared.
  const Exchange* exchange() const { return sharing_ ? &sharing_->exchange : nullptr; }

  /// The states of whole weights, by weight. If steps are shared, they are gathered on the process `root` (-1: on all),
  /// and others get none.
  ParamStates gathered_states(int root = -1) const;

  /// Replaces all states by these, of whole weights. If steps are shared, each process keeps its pieces of them.
  void set_states(const ParamStates& states);

  /// The gradients of the weights and pieces that the next step() of this process updates. If processes share the step,
  /// this is collective and exchanges gradients now instead of in the step. They can be measured, or scaled in place.
  std::vector<OwnGradient> own_gradients();

  /// Muon's weights that the next step would update (those with gradients), batched by equal options. Makes no step.
  std::vector<std::pair<StepOptions, std::vector<Weight>>> weights_of_next_step();

  /// AdamW steps first, as in the paper's recipe.
  torch::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  /// Also reads files of torch::optim::AdamW into groups of AdamW. Changes nothing if the file does not fit.
  void load(torch::serialize::InputArchive& archive) override;

 private:
  // A weight, or a piece of one that this process owns, and what its step needs.
  struct Unit {
    size_t group = 0;
    size_t in_group = 0;
    torch::Tensor value = {};
    torch::Tensor grad = {};
    std::optional<OwnedHeads> owned = {};
  };
  // This process's side of shared steps.
  struct Sharing {
    Exchange exchange;
    Gradients gradients;
    std::vector<std::pair<size_t, size_t>> places;  // group and index in it of each shared weight
    std::map<size_t, torch::Tensor>
        values;  // by piece: the own pieces; views of weights where possible
    // A step that has begun, and the gradients of the own pieces that have come, by round.
    std::unique_ptr<Exchange::Step> step = {};
    std::vector<std::optional<std::vector<torch::Tensor>>> grads = {};
  };

  std::vector<Unit> units_with_gradients();
  std::vector<std::pair<StepOptions, std::vector<Weight>>> batches_of(
      const std::vector<Unit>& units);
  void step_units(const std::vector<Unit>& units);
  void begin_shared_step();
  const std::vector<torch::Tensor>& grads_of_round(Exchange::Step& step, int64_t round);
  void step_shared();
  size_t index_of(const Unit& unit) const;

  std::unique_ptr<Sharing> sharing_;
};

/// The options of a group, or nullptr if the other algorithm steps it.
GroupMuonOptions* muon_options(torch::optim::OptimizerParamGroup& group);
torch::optim::AdamWOptions* adamw_options(torch::optim::OptimizerParamGroup& group);

}  // namespace group_muon
