#include "train/recipe.h"

#include <algorithm>
#include <cmath>
#include <string_view>

namespace train {
namespace {

void check_group(const Config& config, const char* key, const std::string& text, int64_t heads) {
  try {
    group_muon::checked(group_muon::parse_schedule(text), heads, "");
  } catch (const c10::Error& error) {
    std::string why = error.what_without_backtrace();
    for (const char* prefix : {"group_muon: ", ": "}) {
      if (why.rfind(prefix, 0) == 0) why.erase(0, std::string_view(prefix).size());
    }
    TORCH_CHECK_VALUE(
        false, key, " = ", text, " does not fit ", heads, " of ", config.heads, " heads: ", why);
  }
}

void check_choice(
    const char* key, const std::string& value, const std::vector<std::string>& choices) {
  if (std::find(choices.begin(), choices.end(), value) != choices.end()) return;
  std::string list;
  for (const auto& choice : choices) list.append(list.empty() ? "" : ", ").append(choice);
  TORCH_CHECK_VALUE(false, key, " should be one of ", list, ", not '", value, "'");
}

void check_fraction(const char* key, double value) {
  TORCH_CHECK_VALUE(value < 1, key, " should be below 1, not ", value);
}

}  // namespace

void check(const Config& config) {
  constexpr int64_t kLarge = int64_t{1} << 31;  // products of any two still fit
  for (const auto& key : config_keys()) {
    if (const auto* member = std::get_if<int64_t Config::*>(&key.member)) {
      const std::string_view name = key.name;
      const int64_t value = config.**member;
      const bool may_be_zero = name == "kv-heads" || name == "vocabulary" ||
                               name == "micro-batch" || name == "warmup" || name == "warmdown" ||
                               name == "seed" || name == "checkpoint-interval" || name == "threads";
      const int64_t least = may_be_zero ? 0 : 1, most = name == "threads" ? 1024 : kLarge;
      TORCH_CHECK_VALUE(
          value >= least && value <= most, name, " should be from ", least, " to ", most, ", not ",
          value);
    } else if (const auto* number = std::get_if<double Config::*>(&key.member)) {
      TORCH_CHECK_VALUE(
          config.**number >= 0 && std::isfinite(config.**number), key.name,
          " should be 0 or more, not ", config.**number);
    }
  }
  TORCH_CHECK_VALUE(
      config.warmup + config.warmdown <= config.steps, "warmup and warmdown should fit into ",
      config.steps, " steps, but they are ", config.warmup, " and ", config.warmdown);
  check_fraction("momentum", config.momentum);
  check_fraction("adamw-beta1", config.adamw_beta1);
  check_fraction("adamw-beta2", config.adamw_beta2);
  check_choice("device", config.device, {"cpu", "cuda"});
  check_choice("precision", config.precision, {"bf16", "fp32"});
  check_choice("validation-precision", config.validation_precision, {"bf16", "fp32"});
  check_choice("qkv", config.qkv, {"three-way", "packed"});
  gpt::ModelShape shape = model_shape(config);
  if (shape.vocabulary == 0) shape.vocabulary = 1;  // not known yet
  gpt::check(shape);
  if (config.qkv == "packed") {
    TORCH_CHECK_VALUE(
        config.qk_group == "all" && config.k_group.empty() && config.v_group == "all" &&
            !config.share_qk,
        "qkv = packed has no head groups; leave qk-group, k-group, v-group and share-qk away");
  } else {
    check_group(config, "qk-group", config.qk_group, shape.heads);
    const bool own = !config.k_group.empty();
    check_group(
        config, own ? "k-group" : "qk-group", own ? config.k_group : config.qk_group,
        shape.key_heads());
    check_group(config, "v-group", config.v_group, shape.key_heads());
  }
  group_muon::step_options(optimizer_options(config).muon);
}

gpt::ModelShape model_shape(const Config& config) {
  return {
      .layers = config.layers,
      .heads = config.heads,
      .kv_heads = config.kv_heads,
      .width = config.width,
      .context = config.context,
      .vocabulary = config.vocabulary};
}

torch::ScalarType matmul_precision(const std::string& name) {
  return name == "bf16" ? torch::kBFloat16 : torch::kFloat32;
}

group_muon::AssembleOptions optimizer_options(const Config& config) {
  group_muon::AssembleOptions options;
  options.muon = group_muon::GroupMuonOptions(config.muon_lr)
                     .momentum(config.momentum)
                     .nesterov(config.nesterov)
                     .average(config.average)
                     .weight_decay(config.muon_weight_decay)
                     .seed(config.seed)
                     .method(config.method)
                     .coefficients(config.coefficients)
                     .steps(config.iterations)
                     .precision(config.muon_precision)
                     .eps(config.eps)
                     .relative_eps(config.relative_eps)
                     .base_scale(config.base_scale)
                     .transfer(config.transfer)
                     .reference(config.reference);
  options.adamw = torch::optim::AdamWOptions(config.adamw_lr)
                      .betas({config.adamw_beta1, config.adamw_beta2})
                      .eps(config.adamw_eps)
                      .weight_decay(config.adamw_weight_decay);
  if (config.qkv == "packed") return options;  // no layout: the whole matrix
  const auto shape = model_shape(config);
  options.layouts = {
      {"attn.c_attn.weight",
       group_muon::packed_qkv(
           {.heads = shape.heads, .head_dim = shape.head_dim(), .kv_heads = shape.key_heads()},
           {.q = group_muon::parse_schedule(config.qk_group),
            .k = group_muon::parse_schedule(
                config.k_group.empty() ? config.qk_group : config.k_group),
            .v = group_muon::parse_schedule(config.v_group),
            .share_qk = config.share_qk})}};
  return options;
}

double lr_factor(const Config& config, int64_t step) {
  if (step < config.warmup) {
    return static_cast<double>(step + 1) / static_cast<double>(config.warmup);
  }
  if (step < config.steps - config.warmdown) return 1;
  return static_cast<double>(config.steps - step) / static_cast<double>(config.warmdown);
}

}  // namespace train
