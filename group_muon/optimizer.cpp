#include "group_muon/optimizer.h"

#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <utility>

#include "group_muon/adamw.h"

namespace group_muon {
namespace {

using torch::optim::AdamWOptions;
using torch::optim::AdamWParamState;
using torch::optim::OptimizerParamGroup;

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
void check_muon(const OptimizerParamGroup& group, size_t first_index) {
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
    ParamStates& states, const torch::Tensor& parameter, const std::string& name) {
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

// A group in a file: the keys of its weights there, and its options.
struct SavedGroup {
  std::vector<std::string> keys;
  std::unique_ptr<torch::optim::OptimizerOptions> options;
  bool is_muon = false;
};

// Reads a group as torch::optim::serialize wrote it.
SavedGroup read_group(torch::serialize::InputArchive& groups, size_t number) {
  torch::serialize::InputArchive archive, options;
  groups.read("param_groups/" + std::to_string(number), archive);
  archive.read("options", options);
  SavedGroup group;
  torch::Tensor count;
  archive.read("params/size", count);
  for (int64_t i = 0; i < count.item<int64_t>(); ++i) {
    torch::IValue key;
    archive.read("params/" + std::to_string(i), key);
    group.keys.push_back(key.toStringRef());
  }
  torch::IValue ignored;
  group.is_muon = options.try_read("layout", ignored);
  TORCH_CHECK_VALUE(
      group.is_muon || options.try_read("betas", ignored), "group_muon: group ", number,
      " of the file is neither Group Muon's nor AdamW's; was the file "
      "written by another optimizer?");
  if (group.is_muon) {
    group.options = std::make_unique<GroupMuonOptions>();
  } else {
    group.options = std::make_unique<AdamWOptions>();
  }
  group.options->serialize(options);
  return group;
}

void check_fits(const SavedGroup& saved, OptimizerParamGroup& ours, size_t number) {
  const auto algorithm = [](bool is_muon) { return is_muon ? "Muon" : "AdamW"; };
  const bool is_muon = muon_options(ours) != nullptr;
  TORCH_CHECK_VALUE(
      saved.is_muon == is_muon, "group_muon: parameter group ", number, " is stepped by ",
      algorithm(is_muon), ", but by ", algorithm(saved.is_muon), " in the file");
  TORCH_CHECK_VALUE(
      saved.keys.size() == ours.params().size(), "group_muon: parameter group ", number, " has ",
      ours.params().size(), " weights, but ", saved.keys.size(), " in the file");
}

std::unique_ptr<torch::optim::OptimizerParamState> read_param_state(
    torch::serialize::InputArchive& archive, bool is_muon) {
  std::unique_ptr<torch::optim::OptimizerParamState> state;
  if (is_muon) {
    state = std::make_unique<GroupMuonParamState>();
  } else {
    state = std::make_unique<AdamWParamState>();
  }
  state->serialize(archive);
  return state;
}

}  // namespace

GroupMuonOptions* muon_options(OptimizerParamGroup& group) {
  return dynamic_cast<GroupMuonOptions*>(&group.options());
}

AdamWOptions* adamw_options(OptimizerParamGroup& group) {
  return dynamic_cast<AdamWOptions*>(&group.options());
}

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
  OptimizerParamGroup group(param_group.params(), defaults_->clone());
  if (param_group.has_options()) group.set_options(param_group.options().clone());
  if (auto* muon = muon_options(group)) {
    *muon = muon->merged_with(defaults);
    size_t first_index = 0;
    for (const auto& other : param_groups_) first_index += other.params().size();
    check_muon(group, first_index);
  } else {
    TORCH_CHECK_TYPE(
        adamw_options(group) != nullptr,
        "group_muon: the options of a GroupMuon parameter group should be GroupMuonOptions or "
        "torch::optim::AdamWOptions");
    check_adamw(group);
  }
  Optimizer::add_param_group(OptimizerParamGroup(group.params()));
  param_groups_.back().set_options(group.options().clone());
}

void GroupMuon::set_grouping(const GroupingSchedule& grouping, std::string_view segment) {
  // Checks all layouts before changing any.
  std::vector<std::pair<GroupMuonOptions*, Layout>> changes;
  size_t index = 0;
  for (auto& group : param_groups_) {
    auto* options = muon_options(group);
    const bool affected = options != nullptr && has_segment(options->layout(), segment);
    if (affected) {
      changes.emplace_back(options, with_grouping(options->layout(), grouping, segment));
    }
    for (size_t i = 0; i < group.params().size(); ++i, ++index) {
      if (!affected) continue;
      checked(changes.back().second, group.params()[i].sizes(), parameter_name(*options, i, index));
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
    if (muon_options(group) == nullptr) {
      index += group.params().size();
      continue;
    }
    auto& options = *muon_options(group);
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
  // Check everything before writing anything.
  for (auto& group : param_groups_) {
    if (adamw_options(group) != nullptr) check_adamw(group);
  }
  const auto batches = weights_of_next_step();
  for (auto& group : param_groups_) {
    if (adamw_options(group) != nullptr) step_adamw(group, state_);
  }
  for (const auto& [shared, weights] : batches) {
    group_muon::step(weights, shared);
    for (const auto& weight : weights) {
      auto& state = state_of(state_, weight.value, weight.name);
      state.step(state.step() + 1);
    }
  }
  return loss;
}

void GroupMuon::save(torch::serialize::OutputArchive& archive) const {
  // libtorch's format. States and options write themselves, whichever they are.
  torch::optim::serialize<torch::optim::OptimizerParamState, torch::optim::OptimizerOptions>(
      archive, *this);
}

void GroupMuon::load(torch::serialize::InputArchive& archive) {
  torch::serialize::InputArchive groups, states;
  TORCH_CHECK_VALUE(
      archive.try_read("param_groups", groups) && archive.try_read("state", states),
      "group_muon: this is not a file of an optimizer");
  torch::Tensor count;
  groups.read("param_groups/size", count);
  TORCH_CHECK_VALUE(
      count.item<int64_t>() == static_cast<int64_t>(param_groups_.size()),
      "group_muon: the file has ", count.item<int64_t>(), " parameter groups, the optimizer ",
      param_groups_.size());
  std::vector<SavedGroup> saved;
  ParamStates loaded;
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    saved.push_back(read_group(groups, i));
    check_fits(saved[i], param_groups_[i], i);
    for (size_t j = 0; j < saved[i].keys.size(); ++j) {
      torch::serialize::InputArchive state;
      if (!states.try_read(saved[i].keys[j], state)) continue;  // not stepped yet
      loaded[param_groups_[i].params()[j].unsafeGetTensorImpl()] =
          read_param_state(state, saved[i].is_muon);
    }
  }
  for (size_t i = 0; i < saved.size(); ++i)
    param_groups_[i].set_options(std::move(saved[i].options));
  for (auto& [weight, state] : loaded) state_[weight] = std::move(state);
}

}  // namespace group_muon
