#include "group_muon/adamw.h"

#include <ATen/ATen.h>

#include <map>
#include <utility>

namespace group_muon {
namespace {

using torch::Tensor;
using torch::optim::AdamWParamState;

// Arguments of one kernel call: tensors of one device and dtype.
struct FusedLists {
  std::vector<Tensor> params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps;
};

AdamWParamState& state_of(
    ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>& states,
    const Tensor& parameter, bool amsgrad) {
  auto& slot = states[parameter.unsafeGetTensorImpl()];
  if (!slot) {
    const auto zeros = [&] { return torch::zeros_like(parameter, torch::MemoryFormat::Preserve); };
    auto fresh = std::make_unique<AdamWParamState>();
    fresh->step(0);
    fresh->exp_avg(zeros());
    fresh->exp_avg_sq(zeros());
    if (amsgrad) fresh->max_exp_avg_sq(zeros());
    slot = std::move(fresh);
  }
  auto& state = static_cast<AdamWParamState&>(*slot);
  // Loaded state may have another device or dtype.
  const auto fit = [&](const Tensor& buffer) {
    return buffer.defined() ? buffer.to(parameter.device(), parameter.scalar_type()) : buffer;
  };
  state.exp_avg(fit(state.exp_avg()));
  state.exp_avg_sq(fit(state.exp_avg_sq()));
  state.max_exp_avg_sq(fit(state.max_exp_avg_sq()));
  return state;
}

}  // namespace

Tensor FusedAdamW::step(LossClosure closure) {
  const torch::NoGradGuard no_grad;
  Tensor loss;
  if (closure) {
    const at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  for (auto& group : param_groups_) {
    const auto& options = static_cast<torch::optim::AdamWOptions&>(group.options());
    std::map<std::pair<std::string, at::ScalarType>, FusedLists> calls;
    for (const auto& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      TORCH_CHECK_TYPE(
          !parameter.grad().is_sparse(),
          "group_muon: FusedAdamW does not support sparse gradients, but a parameter of shape ",
          parameter.sizes(), " has one");
      auto& state = state_of(state_, parameter, options.amsgrad());
      state.step(state.step() + 1);
      auto& lists = calls[{parameter.device().str(), parameter.scalar_type()}];
      lists.params.push_back(parameter);
      lists.grads.push_back(parameter.grad());
      lists.exp_avgs.push_back(state.exp_avg());
      lists.exp_avg_sqs.push_back(state.exp_avg_sq());
      if (options.amsgrad()) lists.max_exp_avg_sqs.push_back(state.max_exp_avg_sq());
      lists.steps.push_back(
          torch::full(
              {}, static_cast<double>(state.step()),
              at::TensorOptions(parameter.device()).dtype(at::kFloat)));
    }
    const auto [beta1, beta2] = options.betas();
    for (auto& [key, lists] : calls) {
      at::_fused_adamw_(
          lists.params, lists.grads, lists.exp_avgs, lists.exp_avg_sqs, lists.max_exp_avg_sqs,
          lists.steps, options.lr(), beta1, beta2, options.weight_decay(), options.eps(),
          options.amsgrad(), /*maximize=*/false);
      // The fused kernel does not do this. Without it autograd and copies of weights would miss the change.
      for (const auto& parameter : lists.params) parameter.unsafeGetTensorImpl()->bump_version();
    }
  }
  return loss;
}

}  // namespace group_muon
