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

// The tensor with the weight's device, dtype and strides. The fused kernel walks through memory and does not look at
// strides.
Tensor fitted(const Tensor& tensor, const Tensor& weight) {
  if (!tensor.defined()) return tensor;
  Tensor same = tensor.to(weight.device(), weight.scalar_type());
  if (same.strides() == weight.strides()) return same;
  return at::empty_like(weight).copy_(same);
}

AdamWParamState& state_of(ParamStates& states, const Tensor& parameter, bool amsgrad) {
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
  // Loaded state may have another device, dtype or strides.
  state.exp_avg(fitted(state.exp_avg(), parameter));
  state.exp_avg_sq(fitted(state.exp_avg_sq(), parameter));
  state.max_exp_avg_sq(fitted(state.max_exp_avg_sq(), parameter));
  return state;
}

}  // namespace

void check_adamw(const torch::optim::OptimizerParamGroup& group) {
  const auto& options = static_cast<const torch::optim::AdamWOptions&>(group.options());
  const auto not_negative = [](const char* name, double value) {
    TORCH_CHECK_VALUE(
        value >= 0, "group_muon: ", name, " of an AdamW group should be 0 or more, not ", value);
  };
  not_negative("lr", options.lr());
  not_negative("eps", options.eps());
  not_negative("weight_decay", options.weight_decay());
  const auto [beta1, beta2] = options.betas();
  TORCH_CHECK_VALUE(
      beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1,
      "group_muon: betas should be two numbers in [0, 1), not ", beta1, " and ", beta2);
  for (const auto& weight : group.params()) {
    TORCH_CHECK_TYPE(
        weight.layout() == at::kStrided && weight.is_floating_point() &&
            weight.is_non_overlapping_and_dense(),
        "group_muon: an AdamW group supports only dense real floating-point weights, but one of "
        "shape ",
        weight.sizes(), " is ", weight.layout(), ", ", weight.scalar_type(), ", with strides ",
        weight.layout() == at::kStrided ? weight.strides() : at::IntArrayRef());
    TORCH_CHECK_TYPE(
        !weight.grad().defined() || !weight.grad().is_sparse(),
        "group_muon: an AdamW group supports only dense gradients, but a weight of shape ",
        weight.sizes(), " has a sparse one");
  }
}

void step_adamw(const torch::optim::OptimizerParamGroup& group, ParamStates& states) {
  const torch::NoGradGuard no_grad;
  const auto& options = static_cast<const torch::optim::AdamWOptions&>(group.options());
  std::map<std::pair<std::string, at::ScalarType>, FusedLists> calls;
  for (const auto& parameter : group.params()) {
    if (!parameter.grad().defined()) continue;
    auto& state = state_of(states, parameter, options.amsgrad());
    state.step(state.step() + 1);
    auto& lists = calls[{parameter.device().str(), parameter.scalar_type()}];
    lists.params.push_back(parameter);
    lists.grads.push_back(fitted(parameter.grad(), parameter));
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

}  // namespace group_muon
