#include "group_muon/assemble.h"

#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <map>
#include <set>

#include "group_muon/roles.h"

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

// The weight of a layer that maps vectors to vectors, or an undefined tensor.
Tensor weight_of_layer(torch::nn::Module& module) {
  using namespace torch::nn;  // NOLINT(google-build-using-namespace): a list of layers
  const auto of = [](auto* layer) { return layer == nullptr ? Tensor() : layer->weight; };
  for (const Tensor& weight :
       {of(module.as<LinearImpl>()), of(module.as<Conv1dImpl>()), of(module.as<Conv2dImpl>()),
        of(module.as<Conv3dImpl>()), of(module.as<ConvTranspose1dImpl>()),
        of(module.as<ConvTranspose2dImpl>()), of(module.as<ConvTranspose3dImpl>())}) {
    if (weight.defined()) return weight;
  }
  return {};
}

// The model inside wrappers that hold nothing else with weights.
torch::nn::Module& net_of(torch::nn::Module& model) {
  if (!model.parameters(/*recurse=*/false).empty()) return model;
  std::shared_ptr<torch::nn::Module> only;
  for (const auto& child : model.named_children()) {
    if (child.value()->parameters().empty()) continue;
    if (only || !head_by_name(child.key()).empty()) return model;
    only = child.value();
  }
  return only ? net_of(*only) : model;
}

Tensor own_weight(torch::nn::Module& module) {
  const auto own = module.named_parameters(/*recurse=*/false);
  const auto* weight = own.find("weight");
  return weight == nullptr ? Tensor() : *weight;
}

// The last matrix of an output head. None if the matrix is square and a norm follows: that is what comes before the
// output.
Tensor last_matrix(torch::nn::Module& head) {
  Tensor last;
  bool norm = false;
  for (const auto& module : head.modules()) {
    const Tensor weight = weight_of_layer(*module);
    const Tensor own = own_weight(*module);
    norm = !weight.defined() && (norm || (own.defined() && own.dim() == 1));
    if (weight.defined()) last = weight;
  }
  if (last.defined()) return norm && last.size(0) == last.size(1) ? Tensor() : last;
  const Tensor weight = own_weight(head);
  return weight.defined() && weight.dim() >= 2 ? weight : Tensor();
}

void find_heads(torch::nn::Module& model, std::set<void*>& found) {
  const auto insert = [&](torch::nn::Module& head) {
    const Tensor weight = last_matrix(head);
    if (weight.defined()) found.insert(weight.unsafeGetTensorImpl());
  };
  for (const auto& item : net_of(model).named_modules("", /*include_self=*/false)) {
    auto& module = *item.value();
    const std::string state = head_by_name(item.key());
    const bool linear = module.as<torch::nn::LinearImpl>() != nullptr;
    if (state.empty() || (state == "guessed if linear" && !linear)) continue;
    const bool several = module.as<torch::nn::ModuleListImpl>() != nullptr ||
                         module.as<torch::nn::ModuleDictImpl>() != nullptr;
    if (!several) insert(module);
    for (const auto& child : module.children()) {
      if (several) insert(*child);
    }
  }
}

// Parameters that a module of no known kind has under a name that says what they are.
void find_by_own_name(torch::nn::Module& model, std::set<void*>& found) {
  const auto visit = [&](const std::string& path, const torch::nn::Module& module) {
    const auto name = path.substr(path.rfind('.') + 1);
    for (const auto& own : module.named_parameters(/*recurse=*/false)) {
      const bool embedding = own.key() == "weight" && is_embedding_name(name);
      if (embedding || !role_by_name(own.key()).empty()) {
        found.insert(own.value().unsafeGetTensorImpl());
      }
    }
  };
  visit("", model);  // libtorch lists the model itself only if a shared_ptr holds it
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    if (!weight_of_layer(*item.value()).defined()) visit(item.key(), *item.value());
  }
}

// Whether a convolution has one filter per channel, which is not a matrix.
template <typename Convolution>
bool is_depthwise(const Convolution& convolution) {
  return convolution.options.groups() > 1 && convolution.weight.size(1) == 1;
}

// Matrices that go to AdamW.
std::set<void*> adamw_matrices(torch::nn::Module& model, const AssembleOptions& options) {
  std::set<void*> found;
  for_weights_of<torch::nn::EmbeddingImpl, torch::nn::EmbeddingBagImpl>(
      model, [&](const Tensor& weight) { found.insert(weight.unsafeGetTensorImpl()); });
  find_heads(model, found);
  find_by_own_name(model, found);
  for (const auto& module : model.modules(/*include_self=*/false)) {
    if (module->as<torch::nn::LayerNormImpl>() == nullptr) continue;  // over heads × size, say
    for (const Tensor& own : module->parameters()) found.insert(own.unsafeGetTensorImpl());
  }
  const auto insert_depthwise = [&](const auto* convolution) {
    if (convolution != nullptr && is_depthwise(*convolution)) {
      found.insert(convolution->weight.unsafeGetTensorImpl());
    }
  };
  for (const auto& module : model.modules(/*include_self=*/false)) {
    insert_depthwise(module->as<torch::nn::Conv1dImpl>());
    insert_depthwise(module->as<torch::nn::Conv2dImpl>());
    insert_depthwise(module->as<torch::nn::Conv3dImpl>());
  }
  for (const auto& item : model.named_parameters()) {
    const bool named = std::any_of(
        options.adamw_names.begin(), options.adamw_names.end(),
        [&](const std::string& ending) { return has_ending(item.key(), ending); });
    if (named) found.insert(item.value().unsafeGetTensorImpl());
  }
  return found;
}

// Also 1 × 1 × n and n × 1.
bool is_vector(const Tensor& parameter) {
  const auto sizes = parameter.sizes();
  return std::count_if(sizes.begin(), sizes.end(), [](int64_t size) { return size > 1; }) < 2;
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

GroupMuon assemble(torch::nn::Module& model, const AssembleOptions& options) {
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
    if (is_vector(parameter) || for_adamw.count(identity) > 0) {
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
  std::vector<OptimizerParamGroup> all;
  if (!adamw_params.empty()) {
    all.emplace_back(adamw_params, std::make_unique<torch::optim::AdamWOptions>(options.adamw));
  }
  for (auto& group : groups) {
    auto group_options = std::make_unique<GroupMuonOptions>(defaults);
    group_options->layout(group.layout).names(group.names);
    all.emplace_back(group.params, std::move(group_options));
  }
  return GroupMuon(all, defaults);
}

void check_whole_model(const torch::nn::Module& model, const torch::optim::Optimizer& optimizer) {
  std::set<void*> held;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& weight : group.params()) held.insert(weight.unsafeGetTensorImpl());
  }
  std::vector<std::string> missing;
  for (const auto& item : model.named_parameters()) {
    const bool trained = held.count(item.value().unsafeGetTensorImpl()) > 0;
    if (item.value().requires_grad() && !trained) missing.push_back(item.key());
  }
  TORCH_CHECK_VALUE(
      missing.empty(), "group_muon: the optimizer lacks ", missing.size(),
      " trainable weights of the model, so they would never be trained; the first is '",
      missing.empty() ? std::string() : missing.front(), "'");
}

}  // namespace group_muon
