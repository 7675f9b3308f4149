#pragma once
// The usual split: Group Muon for the hidden matrices, AdamW for everything else.

#include <torch/nn/module.h>

#include <string>
#include <utility>
#include <vector>

#include "group_muon/optimizer.h"

namespace group_muon {

struct AssembleOptions {
  GroupMuonOptions muon = {};
  torch::optim::AdamWOptions adamw =
      torch::optim::AdamWOptions(3.6e-3).betas({0.9, 0.95}).weight_decay(0);
  /// Layouts of attention weights by the end of their names, such as {"attn.c_attn.weight", …};
  /// the first match is used. Convolutions are flattened, other matrices are plain.
  std::vector<std::pair<std::string, Layout>> layouts = {};
  /// Further matrices for AdamW, by the end of their names.
  std::vector<std::string> adamw_names = {};
};

/// One optimizer for all trainable weights of the model: a group of AdamW, then a group of Muon for each layout.
/// Embeddings, output heads (roles.h) and everything that is not a matrix go to AdamW. A weight with two names (a tied
/// head) is used once, and goes to AdamW if either name does.
GroupMuon assemble(torch::nn::Module& model, const AssembleOptions& options = {});

/// Rejects an optimizer that lacks trainable weights of the model: they would never be trained. For groups of your own;
/// those of assemble are complete.
void check_whole_model(const torch::nn::Module& model, const torch::optim::Optimizer& optimizer);

}  // namespace group_muon
