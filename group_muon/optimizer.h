#pragma once
// GroupMuon as a libtorch optimizer: state and the usual interface around group_muon::step.

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>

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

  /// The weights that the next step would update (those with gradients), batched by equal options. Makes no step.
  std::vector<std::pair<StepOptions, std::vector<Weight>>> weights_of_next_step();

  torch::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  template <typename Self, typename Archive>
  static void serialize(Self& self, Archive& archive) {
    _TORCH_OPTIM_SERIALIZE_WITH_TEMPLATE_ARG(GroupMuon);
  }
};

}  // namespace group_muon
