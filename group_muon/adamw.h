#pragma once
// AdamW with libtorch's fused kernel, for the parameters Group Muon does not take: embeddings, head, gains, biases.

#include <torch/optim/adamw.h>

namespace group_muon {

/// torch::optim::AdamW (same options, state and files), stepped by one fused kernel per group.
class FusedAdamW : public torch::optim::AdamW {
 public:
  using torch::optim::AdamW::AdamW;
  torch::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace group_muon
