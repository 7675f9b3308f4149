#pragma once
// GroupMuon as a libtorch optimizer: state and the usual interface around group_muon::step, and AdamW for other weights.

#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

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

  /// Muon's weights that the next step would update (those with gradients), batched by equal options. Makes no step.
  std::vector<std::pair<StepOptions, std::vector<Weight>>> weights_of_next_step();

  /// AdamW steps first, as in the paper's recipe.
  torch::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  /// Also reads files of torch::optim::AdamW into groups of AdamW. Changes nothing if the file does not fit.
  void load(torch::serialize::InputArchive& archive) override;
};

/// The options of a group, or nullptr if the other algorithm steps it.
GroupMuonOptions* muon_options(torch::optim::OptimizerParamGroup& group);
torch::optim::AdamWOptions* adamw_options(torch::optim::OptimizerParamGroup& group);

}  // namespace group_muon
