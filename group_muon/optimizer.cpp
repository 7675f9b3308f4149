#include "group_muon/optimizer.h"

#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <utility>

#include "group_muon/adamw.h"
#include "group_muon/text.h"

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

// Replaces precision "auto" by the choice for this weight. In a group on several devices the first weight with a
// gradient decides.
void settle_precision(GroupMuonOptions& options, const torch::Tensor& weight) {
  if (options.precision() != "auto" || weight.is_meta()) return;
  const auto here = resolved(step_options(options).orthogonalize, weight.device());
  options.precision(std::string(precision_name(here.precision)));
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

// All options of all groups as one text, to compare processes.
std::string text_of(std::vector<OptimizerParamGroup>& groups) {
  std::string text;
  for (auto& group : groups) {
    text += " |";
    if (const auto* muon = muon_options(group)) {
      for (const auto& option : option_list()) {
        text += c10::str(' ', option.name, '=', option.get(*muon));
      }
    } else if (const auto* adamw = adamw_options(group)) {
      const auto [beta1, beta2] = adamw->betas();
      for (const double value : {adamw->lr(), beta1, beta2, adamw->eps(), adamw->weight_decay()}) {
        text += ' ' + to_text(value);
      }
    }
  }
  return text;
}

int64_t step_of(const torch::optim::OptimizerParamState& state) {
  const auto* adamw = dynamic_cast<const AdamWParamState*>(&state);
  return adamw != nullptr ? adamw->step() : static_cast<const GroupMuonParamState&>(state).step();
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

// A file of an older version lacks the full learning rate.
void keep_full_lr(torch::optim::OptimizerOptions& saved, const GroupMuonOptions& ours) {
  auto& options = static_cast<GroupMuonOptions&>(saved);
  if (options.full_lr() == 0) options.full_lr(ours.full_lr());
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
  TORCH_CHECK_VALUE(
      !sharing_, "group_muon: add all parameter groups before the processes share the steps");
  const auto& defaults = static_cast<const GroupMuonOptions&>(*defaults_);
  OptimizerParamGroup group(param_group.params(), defaults_->clone());
  if (param_group.has_options()) group.set_options(param_group.options().clone());
  if (auto* muon = muon_options(group)) {
    *muon = muon->merged_with(defaults);
    if (muon->full_lr() == 0) muon->full_lr(muon->lr());
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
  // Other groups may need other pieces.
  const auto shared =
      sharing_ ? std::optional(std::pair{sharing_->exchange.group(), sharing_->gradients})
               : std::nullopt;
  if (shared) {
    auto states = gathered_states();
    sharing_.reset();
    set_states(states);
  }
  for (auto& [options, layout] : changes) options->layout(std::move(layout));
  if (shared) share(shared->first, shared->second);
}

size_t GroupMuon::index_of(const Unit& unit) const {
  size_t index = unit.in_group;
  for (size_t i = 0; i < unit.group; ++i) index += param_groups_[i].params().size();
  return index;
}

std::vector<GroupMuon::Unit> GroupMuon::units_with_gradients() {
  std::vector<Unit> units;
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    const auto& params = param_groups_[i].params();
    for (size_t j = 0; j < params.size(); ++j) {
      if (params[j].grad().defined()) units.push_back({i, j, params[j], params[j].grad(), {}});
    }
  }
  return units;
}

std::vector<std::pair<StepOptions, std::vector<Weight>>> GroupMuon::batches_of(
    const std::vector<Unit>& units) {
  // Weights with equal step options are stepped together, which batches their blocks.
  std::vector<std::pair<StepOptions, std::vector<Weight>>> batches;
  for (const auto& unit : units) {
    auto* options = muon_options(param_groups_[unit.group]);
    if (options == nullptr) continue;
    settle_precision(*options, unit.value);
    const auto shared = step_options(*options);
    auto batch = std::find_if(
        batches.begin(), batches.end(), [&](const auto& other) { return other.first == shared; });
    if (batch == batches.end()) batch = batches.insert(batches.end(), {shared, {}});
    const auto index = index_of(unit);
    const auto name = parameter_name(*options, unit.in_group, index);
    check_grad(unit.value, unit.grad, name);
    auto& state = state_of(state_, unit.value, name);
    const auto& whole = param_groups_[unit.group].params()[unit.in_group];
    batch->second.push_back(
        {unit.value, unit.grad, state.momentum_buffer(),
         checked(options->layout(), whole.sizes(), name), name,
         partition_name(*options, unit.in_group, index), state.step(), options->lr(),
         options->weight_decay(), lr_fraction(*options), unit.owned});
  }
  return batches;
}

std::vector<std::pair<StepOptions, std::vector<Weight>>> GroupMuon::weights_of_next_step() {
  const torch::NoGradGuard no_grad;
  return batches_of(units_with_gradients());
}

void GroupMuon::step_units(const std::vector<Unit>& units) {
  // Check everything before writing anything.
  const auto batches = batches_of(units);
  std::map<size_t, std::vector<torch::Tensor>> adamw;
  for (const auto& unit : units) {
    if (adamw_options(param_groups_[unit.group]) != nullptr) {
      adamw[unit.group].push_back(unit.value);
    }
  }
  for (auto& [group, params] : adamw) {
    OptimizerParamGroup some(params);
    some.set_options(param_groups_[group].options().clone());
    step_adamw(some, state_);
  }
  for (const auto& [shared, weights] : batches) {
    group_muon::step(weights, shared);
    for (const auto& weight : weights) {
      auto& state = state_of(state_, weight.value, weight.name);
      state.step(state.step() + 1);
    }
  }
}

torch::Tensor GroupMuon::step(LossClosure closure) {
  const torch::NoGradGuard no_grad;
  torch::Tensor loss;
  if (closure) {
    const at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  for (auto& group : param_groups_) {
    if (adamw_options(group) != nullptr) check_adamw(group);
  }
  if (sharing_) {
    step_shared();
  } else {
    step_units(units_with_gradients());
  }
  return loss;
}

void GroupMuon::share(ProcessGroup group, Gradients gradients) {
  TORCH_CHECK_VALUE(!sharing_, "group_muon: the steps of this optimizer are shared already");
  const torch::NoGradGuard no_grad;
  std::vector<SharedWeight> weights;
  std::vector<std::pair<size_t, size_t>> places;
  c10::Device device = c10::kCPU;
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    auto* muon = muon_options(param_groups_[i]);
    const auto* adamw = adamw_options(param_groups_[i]);
    TORCH_CHECK_VALUE(
        adamw == nullptr || !adamw->amsgrad(),
        "group_muon: amsgrad is not supported when processes share steps");
    const auto& params = param_groups_[i].params();
    if (muon != nullptr && !params.empty()) {  // later a process may own nothing of the group
      settle_precision(*muon, params.front());
    }
    for (size_t j = 0; j < params.size(); ++j) {
      device = params[j].device();
      const auto index = index_of({.group = i, .in_group = j});
      SharedWeight weight{
          .name = muon != nullptr ? parameter_name(*muon, j, index) : std::to_string(index),
          .sizes = params[j].sizes().vec(),
          .dtype = params[j].scalar_type(),
          .adamw = muon == nullptr};
      if (muon != nullptr) {
        weight.layout = checked(muon->layout(), weight.sizes, weight.name);
        weight.whole_segments = muon->match_spectral();
      }
      weights.push_back(std::move(weight));
      places.emplace_back(i, j);
    }
  }
  const auto options = c10::str("gradients=", static_cast<int>(gradients), text_of(param_groups_));
  const auto states = gathered_states();
  sharing_ = std::make_unique<Sharing>(Sharing{
      Exchange(std::move(group), std::move(weights), options, device),
      gradients,
      std::move(places),
      {}});
  const auto& exchange = sharing_->exchange;
  for (const auto i : exchange.own_pieces()) {
    const auto& piece = exchange.pieces()[i];
    const auto [in_groups, in_group] = sharing_->places[piece.weight];
    const auto& param = param_groups_[in_groups].params()[in_group];
    sharing_->values[i] =
        take_piece(param.detach(), exchange.weights()[piece.weight], piece).contiguous();
  }
  set_states(states);
}

void GroupMuon::begin_shared_step() {
  auto& [exchange, gradients, places, values, step, grads] = *sharing_;
  std::vector<torch::Tensor> params, local;
  for (const auto& [group, in_group] : places) {
    params.push_back(param_groups_[group].params()[in_group]);
    local.push_back(params.back().grad());
  }
  const bool averaged = gradients == Gradients::kAveraged;
  const auto active = exchange.with_gradient(local, /*on_all=*/averaged, text_of(param_groups_));
  if (averaged) local.clear();
  step = std::make_unique<Exchange::Step>(exchange, params, active, local);
  grads.assign(step->rounds(), std::nullopt);
}

// The gradients of the own pieces in a round. They come from other processes once.
const std::vector<torch::Tensor>& GroupMuon::grads_of_round(Exchange::Step& step, int64_t round) {
  auto& found = sharing_->grads[round];
  if (found) return *found;
  switch (sharing_->gradients) {
    case Gradients::kLocal:
      return found.emplace(step.mean_grads(round));
    case Gradients::kParts:
      return found.emplace(step.sum_grads(round));
    case Gradients::kAveraged:
      break;
  }
  found.emplace();
  for (const auto i : step.own_pieces(round)) {
    const auto& piece = sharing_->exchange.pieces()[i];
    const auto [group, in_group] = sharing_->places[piece.weight];
    const auto& grad = param_groups_[group].params()[in_group].grad();
    found->push_back(take_piece(grad, sharing_->exchange.weights()[piece.weight], piece));
  }
  return *found;
}

std::vector<OwnGradient> GroupMuon::own_gradients() {
  const torch::NoGradGuard no_grad;
  std::vector<OwnGradient> result;
  const auto lines = [&](size_t group) -> std::optional<Axis> {
    const auto* muon = muon_options(param_groups_[group]);
    return muon == nullptr ? std::nullopt : std::optional(muon->layout().axis);
  };
  if (!sharing_) {
    for (const auto& unit : units_with_gradients()) {
      result.push_back({unit.value, unit.grad, lines(unit.group)});
    }
    return result;
  }
  auto& [exchange, gradients, places, values, step, grads] = *sharing_;
  begin_shared_step();
  for (int64_t round = 0; round < step->rounds(); ++round) {
    const auto own = step->own_pieces(round);
    const auto& own_grads = grads_of_round(*step, round);
    for (size_t i = 0; i < own.size(); ++i) {
      const auto [group, in_group] = places[exchange.pieces()[own[i]].weight];
      result.push_back({param_groups_[group].params()[in_group], own_grads[i], lines(group)});
    }
  }
  return result;
}

void GroupMuon::step_shared() {
  auto& [exchange, gradients, places, values, begun, grads] = *sharing_;
  if (!begun) begin_shared_step();
  const auto step = std::move(begun);  // also if it fails
  const auto whole = [&](const Piece& piece) -> const torch::Tensor& {
    const auto [group, in_group] = sharing_->places[piece.weight];
    return param_groups_[group].params()[in_group];
  };
  for (int64_t round = 0; round < step->rounds(); ++round) {
    const auto own = step->own_pieces(round);
    const auto& own_grads = grads_of_round(*step, round);
    std::vector<Unit> units;
    std::vector<torch::Tensor> sent;
    for (size_t i = 0; i < own.size(); ++i) {
      const auto& piece = exchange.pieces()[own[i]];
      const auto& weight = exchange.weights()[piece.weight];
      const auto [group, in_group] = places[piece.weight];
      auto& value = values.at(own[i]);
      if (!value.is_alias_of(whole(piece))) value.copy_(take_piece(whole(piece), weight, piece));
      value.mutable_grad() = own_grads[i];
      units.push_back({group, in_group, value, value.grad(), owned_heads(weight, piece)});
      sent.push_back(value);
    }
    step_units(units);
    for (size_t i = 0; i < own.size(); ++i) {
      const auto& piece = exchange.pieces()[own[i]];
      sent[i].mutable_grad() = torch::Tensor();
      if (!sent[i].is_alias_of(whole(piece))) {
        put_piece(whole(piece), exchange.weights()[piece.weight], piece, sent[i]);
      }
    }
    step->send_values(round, sent);
  }
  step->receive_values();
}

ParamStates GroupMuon::gathered_states(int root) const {
  const torch::NoGradGuard no_grad;
  ParamStates result;
  if (!sharing_) {
    for (const auto& [weight, state] : state_) result[weight] = state->clone();
    return result;
  }
  auto& [exchange, gradients, places, values, step, grads] = *sharing_;
  const auto own = exchange.own_pieces();
  std::vector<int64_t> counts(places.size(), 0);
  const auto state_at = [&](size_t piece) -> torch::optim::OptimizerParamState* {
    const auto found = state_.find(values.at(piece).unsafeGetTensorImpl());
    return found == state_.end() ? nullptr : found->second.get();
  };
  for (const auto i : own) {
    if (state_at(i) != nullptr) counts[exchange.pieces()[i].weight] = step_of(*state_at(i)) + 1;
  }
  counts = exchange.largest(counts);
  // One kind of tensor after the other: momentum, and AdamW's averages.
  const auto gather = [&](bool adamw, auto&& tensor_of) {
    std::vector<bool> which;
    for (size_t i = 0; i < places.size(); ++i) {
      which.push_back(counts[i] > 0 && exchange.weights()[i].adamw == adamw);
    }
    std::vector<torch::Tensor> tensors;
    for (const auto i : own) {
      const bool wanted = which[exchange.pieces()[i].weight];
      TORCH_CHECK_VALUE(
          !wanted || state_at(i) != nullptr, "group_muon: process ", exchange.rank(),
          " has no state of '", exchange.weights()[exchange.pieces()[i].weight].name,
          "', but others have; all processes should load the same states");
      tensors.push_back(wanted ? tensor_of(*state_at(i)) : torch::Tensor());
    }
    return exchange.assemble(tensors, which, root);
  };
  const auto momentum = gather(false, [](auto& state) {
    return static_cast<GroupMuonParamState&>(state).momentum_buffer();
  });
  const auto averages =
      gather(true, [](auto& state) { return static_cast<AdamWParamState&>(state).exp_avg(); });
  const auto squares =
      gather(true, [](auto& state) { return static_cast<AdamWParamState&>(state).exp_avg_sq(); });
  for (size_t i = 0; i < places.size(); ++i) {
    if (!momentum[i].defined() && !averages[i].defined()) continue;
    const auto [group, in_group] = places[i];
    auto& slot = result[param_groups_[group].params()[in_group].unsafeGetTensorImpl()];
    if (momentum[i].defined()) {
      auto state = std::make_unique<GroupMuonParamState>();
      state->step(counts[i] - 1);
      state->momentum_buffer(momentum[i]);
      slot = std::move(state);
    } else {
      auto state = std::make_unique<AdamWParamState>();
      state->step(counts[i] - 1);
      state->exp_avg(averages[i]);
      state->exp_avg_sq(squares[i]);
      slot = std::move(state);
    }
  }
  return result;
}

void GroupMuon::set_states(const ParamStates& states) {
  const torch::NoGradGuard no_grad;
  state_.clear();
  if (!sharing_) {
    for (const auto& [weight, state] : states) state_[weight] = state->clone();
    return;
  }
  auto& [exchange, gradients, places, values, step, grads] = *sharing_;
  for (const auto i : exchange.own_pieces()) {
    const auto& piece = exchange.pieces()[i];
    const auto& weight = exchange.weights()[piece.weight];
    const auto [group, in_group] = places[piece.weight];
    const auto& param = param_groups_[group].params()[in_group];
    const auto found = states.find(param.unsafeGetTensorImpl());
    if (found == states.end()) continue;
    const auto taken = [&](const torch::Tensor& tensor) {
      return take_piece(tensor, weight, piece).clone(at::MemoryFormat::Contiguous);
    };
    auto& slot = state_[values.at(i).unsafeGetTensorImpl()];
    slot = found->second->clone();
    if (auto* adamw = dynamic_cast<AdamWParamState*>(slot.get())) {
      adamw->exp_avg(taken(adamw->exp_avg()));
      adamw->exp_avg_sq(taken(adamw->exp_avg_sq()));
    } else {
      auto& muon = static_cast<GroupMuonParamState&>(*slot);
      muon.momentum_buffer(taken(muon.momentum_buffer()));
    }
  }
}

void GroupMuon::save(torch::serialize::OutputArchive& archive) const {
  if (sharing_) {
    GroupMuon whole(param_groups_);
    whole.set_states(gathered_states());
    whole.save(archive);
    return;
  }
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
    if (saved[i].is_muon) keep_full_lr(*saved[i].options, *muon_options(param_groups_[i]));
    for (size_t j = 0; j < saved[i].keys.size(); ++j) {
      torch::serialize::InputArchive state;
      if (!states.try_read(saved[i].keys[j], state)) continue;  // not stepped yet
      loaded[param_groups_[i].params()[j].unsafeGetTensorImpl()] =
          read_param_state(state, saved[i].is_muon);
    }
  }
  for (size_t i = 0; i < saved.size(); ++i)
    param_groups_[i].set_options(std::move(saved[i].options));
  if (sharing_) {
    set_states(loaded);
    return;
  }
  for (auto& [weight, state] : loaded) state_[weight] = std::move(state);
}

}  // namespace group_muon
