#include "group_muon/assemble.h"

#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <map>
#include <set>

namespace group_muon {
namespace {

using torch::Tensor;
using torch::optim::OptimizerParamGroup;

// Whether the last components of a dotted name are `ending`.
bool has_ending(const std::string& name, const std::string& ending) {
  if (name == ending) return true;
  const std::string dotted = "." + ending;
  return name.size() > dotted.size() &&
         name.compare(name.size() - dotted.size(), dotted.size(), dotted) == 0;
}

// Calls action(weight) for the weight of every module of these kinds.
template <typename... Kinds, typename Action>
void for_weights_of(torch::nn::Module& model, Action&& action) {
  const auto visit = [&](auto* module) {
    if (module != nullptr) action(module->weight);
  };
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    (visit(item.value()->template as<Kinds>()), ...);
  }
}

// Matrices that go to AdamW.
std::set<void*> adamw_matrices(torch::nn::Module& model, const AssembleOptions& options) {
  std::set<void*> found;
  for_weights_of<torch::nn::EmbeddingImpl, torch::nn::EmbeddingBagImpl>(
      model, [&](const Tensor& weight) { found.insert(weight.unsafeGetTensorImpl()); });
  for (const auto& item : model.named_parameters()) {
    const bool named = std::any_of(
        options.adamw_names.begin(), options.adamw_names.end(),
        [&](const std::string& ending) { return has_ending(item.key(), ending); });
    if (named) found.insert(item.value().unsafeGetTensorImpl());
  }
  return found;
}

// Layouts of weights that are known from their module type: convolutions, stored as out × in × kernel or, if
// transposed, in × out × kernel.
std::map<void*, Layout> layouts_by_module(torch::nn::Module& model) {
  std::map<void*, Layout> found;
  for_weights_of<torch::nn::Conv1dImpl, torch::nn::Conv2dImpl, torch::nn::Conv3dImpl>(
      model, [&](const Tensor& w) { found[w.unsafeGetTensorImpl()] = convolution(); });
  for_weights_of<
      torch::nn::ConvTranspose1dImpl, torch::nn::ConvTranspose2dImpl,
      torch::nn::ConvTranspose3dImpl>(
      model, [&](const Tensor& w) { found[w.unsafeGetTensorImpl()] = transposed(convolution()); });
  return found;
}

// Parameters with the same layout, and their names.
struct LayoutGroup {
  Layout layout;
  std::vector<Tensor> params;
  std::vector<std::string> names;
};

}  // namespace

Optimizers assemble(torch::nn::Module& model, const AssembleOptions& options) {
  const auto for_adamw = adamw_matrices(model, options);
  const auto by_module = layouts_by_module(model);
  std::vector<Tensor> adamw_params;
  std::vector<LayoutGroup> groups;
  std::set<void*> seen;
  std::vector<bool> used(options.layouts.size(), false);
  for (const auto& item : model.named_parameters()) {
    const auto& [name, parameter] = item.pair();
    auto* identity = parameter.unsafeGetTensorImpl();
    if (!parameter.requires_grad() || !seen.insert(identity).second) continue;
    if (parameter.dim() < 2 || for_adamw.count(identity) > 0) {
      adamw_params.push_back(parameter);
      continue;
    }
    const auto known = by_module.find(identity);
    Layout layout = known == by_module.end() ? plain() : known->second;
    for (size_t i = 0; i < options.layouts.size(); ++i) {
      if (!has_ending(name, options.layouts[i].first)) continue;
      layout = options.layouts[i].second;
      used[i] = true;
      break;
    }
    auto group = std::find_if(groups.begin(), groups.end(), [&](const LayoutGroup& other) {
      return other.layout == layout;
    });
    if (group == groups.end()) group = groups.insert(groups.end(), {layout, {}, {}});
    group->params.push_back(parameter);
    group->names.push_back(name);
  }
  for (size_t i = 0; i < used.size(); ++i) {
    TORCH_CHECK_VALUE(
        used[i], "group_muon: no matrix has a name that ends with '", options.layouts[i].first,
        "'; correct or remove its entry in layouts");
  }
  GroupMuonOptions defaults = options.muon;
  defaults.layout(plain()).names({});
  std::vector<OptimizerParamGroup> muon_groups;
  for (auto& group : groups) {
    auto group_options = std::make_unique<GroupMuonOptions>(defaults);
    group_options->layout(group.layout).names(group.names);
    muon_groups.emplace_back(group.params, std::move(group_options));
  }
  return {
      FusedAdamW({OptimizerParamGroup(adamw_params)}, options.adamw),
      GroupMuon(muon_groups, defaults)};
}

void Optimizers::step() {
  adamw.step();
  muon.step();
}

void Optimizers::zero_grad(bool set_to_none) {
  adamw.zero_grad(set_to_none);
  muon.zero_grad(set_to_none);
}

}  // namespace group_muon
