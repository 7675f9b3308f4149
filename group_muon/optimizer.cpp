#include "group_muon/optimizer.h"

#include <torch/serialize/archive.h>

#include <algorithm>
#include <utility>

namespace group_muon {
namespace {

using torch::optim::OptimizerParamGroup;

GroupMuonOptions& options_of(OptimizerParamGroup& group) {
  return static_cast<GroupMuonOptions&>(group.options());
}

// A parameter's name: given by the group, else its index in the optimizer.
std::string parameter_name(const GroupMuonOptions& options, size_t in_group, size_t in_optimizer) {
  return options.names().empty() ? std::to_string(in_optimizer) : options.names()[in_group];
}

// The name of a parameter's random partitions.
std::string partition_name(const GroupMuonOptions& options, size_t in_group, size_t in_optimizer) {
  return options.partitions().empty() ? parameter_name(options, in_group, in_optimizer)
                                      : options.partitions()[in_group];
}

// Rejects a group for every error that can be found before its first step.
void check_group(const OptimizerParamGroup& group, size_t first_index) {
  const auto& options = static_cast<const GroupMuonOptions&>(group.options());
  const auto shared = step_options(options);
  for (const auto& names : {options.names(), options.partitions()}) {
    TORCH_CHECK_VALUE(
        names.empty() || names.size() == group.params().size(), "group_muon: ", names.size(),
        " names are given for ", group.params().size(), " parameters");
  }
  for (size_t i = 0; i < group.params().size(); ++i) {
    const auto name = parameter_name(options, i, first_index + i);
    check_value(group.params()[i], name, options.average());
    if (!group.params()[i].is_meta()) {
      resolved(shared.orthogonalize, group.params()[i].device());
    }
    checked(options.layout(), group.params()[i].sizes(), name);
  }
}

// Replaces precision "auto" by the choice for these weights. In a group on several devices the first weight with a
// gradient decides.
void settle_precision(const OptimizerParamGroup& group, GroupMuonOptions& options) {
  if (options.precision() != "auto") return;
  for (const auto& parameter : group.params()) {
    if (!parameter.grad().defined() || parameter.is_meta()) continue;
    const auto here = resolved(step_options(options).orthogonalize, parameter.device());
    options.precision(std::string(precision_name(here.precision)));
    return;
  }
}

// The state of a parameter, created at its first step. Loaded momentum may have another device or dtype.
GroupMuonParamState& state_of(
    ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>& states,
    const torch::Tensor& parameter, const std::string& name) {
  auto& slot = states[parameter.unsafeGetTensorImpl()];
  if (!slot) {
    auto fresh = std::make_unique<GroupMuonParamState>();
    fresh->momentum_buffer(torch::zeros_like(parameter, torch::MemoryFormat::Preserve));
    slot = std::move(fresh);
  }
  auto& state = static_cast<GroupMuonParamState&>(*slot);
  check_momentum(parameter, state.momentum_buffer(), name);
  state.momentum_buffer(state.momentum_buffer().to(parameter.device(), parameter.scalar_type()));
  return state;
}

}  // namespace

void GroupMuonParamState::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(step);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(momentum_buffer);
}

void GroupMuonParamState::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, step);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(torch::Tensor, momentum_buffer);
}

GroupMuon::GroupMuon(
    const std::vector<OptimizerParamGroup>& param_groups, GroupMuonOptions defaults)
    : Optimizer(
          std::vector<OptimizerParamGroup>{},
          std::make_unique<GroupMuonOptions>(std::move(defaults))) {
  for (const auto& group : param_groups) add_param_group(group);
}

GroupMuon::GroupMuon(std::vector<torch::Tensor> params, GroupMuonOptions defaults)
    : GroupMuon({OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}

void GroupMuon::add_param_group(const OptimizerParamGroup& param_group) {
  const auto& defaults = static_cast<const GroupMuonOptions&>(*defaults_);
  const auto* given = param_group.has_options()
                          ? dynamic_cast<const GroupMuonOptions*>(&param_group.options())
                          : nullptr;
  TORCH_CHECK_TYPE(
      given != nullptr || !param_group.has_options(),
      "group_muon: the options of a GroupMuon parameter group should be GroupMuonOptions");
  const GroupMuonOptions complete = given ? given->merged_with(defaults) : defaults;
  const OptimizerParamGroup group(
      param_group.params(), std::make_unique<GroupMuonOptions>(complete));
  size_t first_index = 0;
  for (const auto& other : param_groups_) first_index += other.params().size();
  check_group(group, first_index);
  Optimizer::add_param_group(group);
  param_groups_.back().set_options(std::make_unique<GroupMuonOptions>(complete));
}

void GroupMuon::set_grouping(const GroupingSchedule& grouping, std::string_view segment) {
  // Checks all layouts before changing any.
  std::vector<std::pair<GroupMuonOptions*, Layout>> changes;
  size_t index = 0;
  for (auto& group : param_groups_) {
    auto& options = options_of(group);
    const bool affected = has_segment(options.layout(), segment);
    if (affected) {
      changes.emplace_back(&options, with_grouping(options.layout(), grouping, segment));
    }
    for (size_t i = 0; i < group.params().size(); ++i, ++index) {
      if (!affected) continue;
      checked(changes.back().second, group.params()[i].sizes(), parameter_name(options, i, index));
    }
  }
  TORCH_CHECK_VALUE(
      !changes.empty(), "group_muon: no parameter group has a segment '", segment, "' to group");
  for (auto& [options, layout] : changes) options->layout(std::move(layout));
}

std::vector<std::pair<StepOptions, std::vector<Weight>>> GroupMuon::weights_of_next_step() {
  const torch::NoGradGuard no_grad;
  // Parameter groups with equal step options are stepped together, which batches their blocks.
  std::vector<std::pair<StepOptions, std::vector<Weight>>> batches;
  size_t index = 0;
  for (auto& group : param_groups_) {
    auto& options = options_of(group);
    settle_precision(group, options);
    const auto shared = step_options(options);
    auto batch = std::find_if(
        batches.begin(), batches.end(), [&](const auto& other) { return other.first == shared; });
    if (batch == batches.end()) batch = batches.insert(batches.end(), {shared, {}});
    for (size_t i = 0; i < group.params().size(); ++i, ++index) {
      const auto& parameter = group.params()[i];
      if (!parameter.grad().defined()) continue;
      const auto name = parameter_name(options, i, index);
      check_grad(parameter, parameter.grad(), name);
      auto& state = state_of(state_, parameter, name);
      batch->second.push_back(
          {parameter, parameter.grad(), state.momentum_buffer(),
           checked(options.layout(), parameter.sizes(), name), name,
           partition_name(options, i, index), state.step(), options.lr(), options.weight_decay()});
    }
  }
  return batches;
}

torch::Tensor GroupMuon::step(LossClosure closure) {
  const torch::NoGradGuard no_grad;
  torch::Tensor loss;
  if (closure) {
    const at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  for (const auto& [shared, weights] : weights_of_next_step()) {
    group_muon::step(weights, shared);
    for (const auto& weight : weights) {
      auto& state = state_of(state_, weight.value, weight.name);
      state.step(state.step() + 1);
    }
  }
  return loss;
}

void GroupMuon::save(torch::serialize::OutputArchive& archive) const { serialize(*this, archive); }

void GroupMuon::load(torch::serialize::InputArchive& archive) { serialize(*this, archive); }

}  // namespace group_muon
