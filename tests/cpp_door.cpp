// cpp_door IN OUT runs the C++ optimizer on what a Python test saved, and saves the weights. cpp_door order … prints
// random orders. The Python tests compare both with the Python optimizer, bit for bit.

#include <torch/torch.h>

#include <fstream>
#include <iostream>
#include <iterator>

#include "group_muon/group_muon.h"

namespace {

torch::IValue load(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return torch::pickle_load({std::istreambuf_iterator<char>(file), {}});
}

// Converts a list saved by Python, whose elements have no common type.
template <typename T>
std::vector<T> list_of(const torch::IValue& value) {
  std::vector<T> list;
  for (const torch::IValue& element : value.toListRef()) list.push_back(element.to<T>());
  return list;
}

void print_orders(int64_t heads, int64_t steps) {
  for (int64_t step = 0; step < steps; ++step) {
    const group_muon::RandomKey key{7, step, group_muon::parameter_key("h.0.attn"), 1};
    for (const auto head : group_muon::random_permutation(heads, key)) std::cout << head << ' ';
    std::cout << '\n';
  }
}

void run(const std::string& in, const std::string& out) {
  const auto saved = load(in).toGenericDict();
  const auto at = [&](const char* key) { return saved.at(key); };
  const auto layouts = list_of<std::string>(at("layouts"));
  const auto names = list_of<std::string>(at("names"));
  std::vector<torch::Tensor> weights;
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const auto& weight : list_of<torch::Tensor>(at("weights"))) {
    weights.push_back(weight.clone().requires_grad_());
    const size_t i = weights.size() - 1;
    auto options = std::make_unique<group_muon::GroupMuonOptions>(0.02);
    options->layout(group_muon::parse_layout(layouts[i])).names({names[i]});
    groups.emplace_back(std::vector{weights[i]}, std::move(options));
  }
  group_muon::GroupMuon optimizer(
      groups, group_muon::GroupMuonOptions(0.02)
                  .seed(at("seed").toInt())
                  .nesterov(at("nesterov").toBool())
                  .weight_decay(at("weight_decay").toDouble())
                  .method(at("method").toStringRef())
                  .coefficients(at("coefficients").toStringRef())
                  .precision(at("precision").toStringRef()));
  for (const auto& grads : at("grads").toListRef()) {
    const auto list = list_of<torch::Tensor>(grads);
    for (size_t i = 0; i < weights.size(); ++i) weights[i].mutable_grad() = list[i];
    optimizer.step();
  }
  for (auto& weight : weights) weight = weight.detach();
  const auto bytes = torch::pickle_save(weights);
  std::ofstream(out, std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

// The algorithm that assemble chooses for a weight with this name: of a linear layer if the name ends with ".weight",
// else a parameter of a plain module.
std::string algorithm_for(const std::string& name) {
  torch::nn::Module model;
  model.register_module("filler", torch::nn::Linear(6, 6));
  auto* owner = &model;
  std::string rest = name;
  const auto next = [&] {
    const auto dot = rest.find('.');
    const std::string part = rest.substr(0, dot);
    rest = dot == std::string::npos ? "" : rest.substr(dot + 1);
    return part;
  };
  for (;;) {
    const std::string part = next();
    if (rest.empty()) {
      owner->register_parameter(part, torch::randn({8, 6}));
      break;
    }
    if (rest == "weight") {
      owner->register_module(part, torch::nn::Linear(6, 8));
      break;
    }
    owner = owner->register_module(part, std::make_shared<torch::nn::Module>()).get();
  }
  auto optimizer = group_muon::assemble(model);
  for (auto& group : optimizer.param_groups()) {
    for (const auto& weight : group.params()) {
      if (!weight.is_same(model.named_parameters()[name])) continue;
      return group_muon::muon_options(group) != nullptr ? "muon" : "adamw";
    }
  }
  return "none";
}

}  // namespace

int main(int argc, char** argv) {
  torch::set_num_threads(1);
  if (argc == 4 && std::string(argv[1]) == "order") {
    print_orders(std::stoll(argv[2]), std::stoll(argv[3]));
  } else if (argc > 2 && std::string(argv[1]) == "roles") {
    for (int i = 2; i < argc; ++i) std::cout << algorithm_for(argv[i]) << '\n';
  } else if (argc == 3) {
    run(argv[1], argv[2]);
  } else {
    std::cerr << "usage: cpp_door IN OUT | cpp_door order HEADS STEPS | cpp_door roles NAME …\n";
    return 2;
  }
  return 0;
}
