// Shared steps from C++: share_door FILE STEPS local|averaged PROCESSES [START]. Started once per process with torchrun's
// variables, or alone. Writes the weights after some steps; the state is saved and loaded in between. With START process 1
// has another learning rate from that step on, and all write what the optimizer says of it.

#include <torch/torch.h>

#include <cstdio>
#include <sstream>
#include <string>

#include "group_muon/optimizer.h"
#include "train/process_group.h"

namespace {

using group_muon::GroupMuonOptions;
using torch::Tensor;
using torch::optim::OptimizerParamGroup;

std::vector<Tensor> weights() {
  torch::manual_seed(1);
  std::vector<Tensor> all = {
      torch::randn({36 * 8, 48}), torch::randn({48, 12 * 8}), torch::randn({40, 56}),
      torch::randn({71, 13}), torch::randn({5})};
  for (auto& weight : all) weight.requires_grad_(true);
  return all;
}

GroupMuonOptions options(const char* layout, const char* name) {
  return GroupMuonOptions(0.02)
      .layout(group_muon::parse_layout(layout))
      .names({name})
      .weight_decay(0.1);
}

group_muon::GroupMuon optimizer_of(const std::vector<Tensor>& all) {
  std::vector<OptimizerParamGroup> groups;
  const auto add = [&](std::vector<Tensor> some, auto own) {
    groups.emplace_back(std::move(some), std::make_unique<decltype(own)>(own));
  };
  add({all[0]},
      options("rows q=12x8@0+8/3:random k=12x8@96+8/3~1 v=12x8@192+8/2:random:3~2", "qkv"));
  add({all[1]}, options("columns o=12x8@0+8/4:interval", "out"));
  add({all[2]}, options("rows", "matrix"));
  add({all[3], all[4]}, torch::optim::AdamWOptions(0.01).weight_decay(0.01));
  return group_muon::GroupMuon(groups);
}

Tensor gradient(const Tensor& weight, size_t index, int step, int rank) {
  torch::manual_seed(1000 * step + 10 * static_cast<int>(index) + rank);
  return torch::randn(weight.sizes());
}

Tensor mean_gradient(const Tensor& weight, size_t index, int step, int processes) {
  Tensor sum = gradient(weight, index, step, 0);
  for (int rank = 1; rank < processes; ++rank) sum = sum + gradient(weight, index, step, rank);
  return sum / processes;
}

int run(int argc, char** argv) {
  if (argc != 5 && argc != 6) {
    std::fprintf(stderr, "share_door FILE STEPS local|averaged PROCESSES [START]\n");
    return 2;
  }
  torch::set_num_threads(1);
  const int steps = std::stoi(argv[2]), processes = std::stoi(argv[4]);
  const auto joined = train::join_processes(std::chrono::seconds(60));
  const bool local = std::string(argv[3]) == "local";
  const auto all = weights();
  auto optimizer = optimizer_of(all);
  const int other_from = argc == 6 && joined.rank == 1 ? std::stoi(argv[5]) : steps;
  const auto other = [&] { optimizer.param_groups().back().options().set_lr(0.02); };
  if (other_from < 0) other();
  if (!joined.alone()) {
    optimizer.share(
        joined.group, local ? group_muon::Gradients::kLocal : group_muon::Gradients::kAveraged);
  }
  for (int step = 0; step < steps; ++step) {
    for (size_t i = 0; i < all.size(); ++i) {
      const auto grad = local && !joined.alone() ? gradient(all[i], i, step, joined.rank)
                                                 : mean_gradient(all[i], i, step, processes);
      all[i].mutable_grad() = grad;
    }
    if (step == other_from) other();
    optimizer.step();
    if (step == steps / 2) {
      std::stringstream file;
      torch::save(optimizer, file);
      torch::load(optimizer, file);
      optimizer.set_grouping(group_muon::parse_schedule("6:random"), "k");
    }
  }
  torch::save(all, argv[1]);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const c10::ValueError& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
    return 1;
  }
}
