#pragma once
// The usual split: Group Muon for the hidden matrices, AdamW for everything else.

#include <torch/nn/module.h>

#include <string>
#include <utility>
#include <vector>

#include "group_muon/adamw.h"
#include "group_muon/optimizer.h"

namespace group_muon {

struct AssembleOptions {
  GroupMuonOptions muon = {};
  torch::optim::AdamWOptions adamw =
      torch::optim::AdamWOptions(3.6e-3).betas({0.9, 0.95}).weight_decay(0);
  /// Layouts of attention weights by the end of their names, such as {"attn.c_attn.weight", …};
  /// the first match is used. Convolutions are flattened, other matrices are plain.
  std::vector<std::pair<std::string, Layout>> layouts = {};
  /// Matrices for AdamW by the end of their names, in addition to the weights of embedding modules.
  std::vector<std::string> adamw_names = {
      "lm_head.weight", "head.weight", "unembed.weight", "wte.weight", "wpe.weight"};
};

/// Both optimizers of a model as one. AdamW steps first, as in the paper's recipe.
struct Optimizers {
  FusedAdamW adamw;
  GroupMuon muon;

  void step();
  void zero_grad(bool set_to_none = true);
};

/// Embeddings, the head and everything that is not a matrix go to AdamW. A weight with two names (a tied
/// head) is used once, and goes to AdamW if either name does.
Optimizers assemble(torch::nn::Module& model, const AssembleOptions& options = {});

}  // namespace group_muon
