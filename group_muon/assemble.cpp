#include "group_muon/assemble.h"

#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <set>

namespace group_muon {
namespace {

using torch::Tensor;
using torch::optim::OptimizerParamGroup;

bool has_ending(const std::string& name, const std::string& ending) {
  return name.size() >= ending.size() &&
         name.compare(name.size() - ending.size(), ending.size(), ending) == 0;
}

// Weights that AdamW gets although they are matrices.
std::set<void*> adamw_matrices(torch::nn::Module& model, const AssembleOptions& options) {
  std::set<void*> found;
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    if (auto* embedding = item.value()->as<torch::nn::EmbeddingImpl>()) {
      found.insert(embedding->weight.unsafeGetTensorImpl());
    }
  }
  for (const auto& item : model.named_parameters()) {
    const bool named = std::any_of(
        options.adamw_names.begin(), options.adamw_names.end(),
        [&](const std::string& ending) { return has_ending(item.key(), ending); });
    if (named) found.insert(item.value().unsafeGetTensorImpl());
  }
  return found;
}

// Parameters of one layout, with their names.
struct LayoutGroup {
  Layout layout;
  std::vector<Tensor> params;
  std::vector<std::string> names;
};

}  // namespace

Optimizers assemble(torch::nn::Module& model, const AssembleOptions& options) {
  const auto for_adamw = adamw_matrices(model, options);
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
    Layout layout = plain();
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
        used[i], "group_muon: no matrix's name ends with '", options.layouts[i].first,
        "', for which a layout is given");
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
