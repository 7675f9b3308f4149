#include "train/recipe.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <cmath>
#include <string_view>

#include "train/candidates.h"

namespace train {
namespace {

// Calls action. Errors start with `prefix` instead of the library's prefix.
template <typename Action>
void with_prefix(const std::string& prefix, Action&& action) {
  try {
    action();
  } catch (const c10::Error& error) {
    std::string why = error.what_without_backtrace();
    for (const char* own : {"group_muon: ", ": "}) {
      if (why.rfind(own, 0) == 0) why.erase(0, std::string_view(own).size());
    }
    TORCH_CHECK_VALUE(false, prefix, ": ", why);
  }
}

void check_group(
    const Config& config, const char* key, const std::string& text, int64_t heads,
    const char* heads_name) {
  group_muon::GroupingSchedule schedule;
  const std::string given = c10::str(key, " = ", text);
  with_prefix(given, [&] { schedule = group_muon::parse_schedule(text); });
  with_prefix(c10::str(given, " does not fit the ", heads, " ", heads_name, " heads"), [&] {
    group_muon::checked(group_muon::with_lr_factor(schedule, config.qkv_lr), heads, "");
  });
}

void check_choice(
    const char* key, const std::string& value, const std::vector<std::string>& choices) {
  if (std::find(choices.begin(), choices.end(), value) != choices.end()) return;
  std::string list;
  for (const auto& choice : choices) list.append(list.empty() ? "" : ", ").append(choice);
  TORCH_CHECK_VALUE(false, key, " should be one of ", list, ", not '", value, "'");
}

void check_range(const std::string& key, int64_t value, int64_t least, int64_t most) {
  TORCH_CHECK_VALUE(
      value >= least && value <= most, key, " should be from ", least, " to ", most, ", not ",
      value);
}

// Which entries of a schedule the run uses.
std::vector<bool> used_entries(const group_muon::GroupingSchedule& schedule, const Config& config) {
  std::vector<bool> used(schedule.size(), false);
  for (int64_t step = 0; step < config.steps; ++step) {
    const auto& now = group_muon::grouping_at(schedule, step, lr_factor(config, step));
    used[&now - schedule.data()] = true;
    if (std::find(used.begin(), used.end(), false) == used.end()) break;
  }
  return used;
}

// The optimizer's options that depend on the machine, resolved for this one.
group_muon::OrthogonalizeOptions muon_on(const torch::Device& device, const Config& config) {
  group_muon::OrthogonalizeOptions options;
  options.method = group_muon::parse_method(config.muon.method());
  options.precision = group_muon::parse_precision(config.muon.precision());
  options.engine = group_muon::parse_engine(config.muon.engine());
  const auto engine = group_muon::parse_engine(config.engine);
  if (options.engine == group_muon::Engine::kAuto && engine != group_muon::Engine::kAuto &&
      (options.precision == group_muon::kAutoPrecision ||
       group_muon::computes_in(engine, options.precision))) {
    options.engine = engine;
  }
  return group_muon::resolved(options, device);
}

// The library's errors speak of a kind of value, such as a scale. Here they also name the key.
void check_option(const Config& config, const Key& key, const group_muon::Option& option) {
  try {
    option.check(config.muon, key.name);
  } catch (const c10::Error& error) {
    std::string words = error.what_without_backtrace();
    const std::string library = "group_muon: ";
    if (words.starts_with(library)) words.erase(0, library.size());
    const bool names_it = words.find(key.name) != std::string::npos;
    TORCH_CHECK_VALUE(false, names_it ? "" : key.name + ": ", words);
  }
}

group_muon::Layout qkv_layout(const Config& config) {
  const auto shape = model_shape(config);
  if (config.qkv == "packed") return packed_as_one(shape, config.qkv_lr);
  const auto schedule = [&](const std::string& text) {
    return group_muon::with_lr_factor(group_muon::parse_schedule(text), config.qkv_lr);
  };
  return group_muon::packed_qkv(
      {.heads = shape.heads, .head_dim = shape.head_dim(), .kv_heads = shape.key_heads()},
      {.q = schedule(config.qk_group),
       .k = schedule(config.k_group.empty() ? config.qk_group : config.k_group),
       .v = schedule(config.v_group),
       .share_qk = config.share_qk});
}

void check_fraction(const char* key, double value) {
  TORCH_CHECK_VALUE(value < 1, key, " should be below 1, not ", value);
}

}  // namespace

void check(const Config& config) {
  constexpr int64_t kMost = int64_t{1} << 31;  // the product of any two fits in int64_t
  constexpr double kLargestNumber = 1e38;      // products in fp32 are still finite
  for (const auto& key : config_keys()) {
    if (const auto* option = std::get_if<const group_muon::Option*>(&key.member)) {
      check_option(config, key, **option);
    } else if (const auto* member = std::get_if<int64_t Config::*>(&key.member)) {
      check_range(key.name, config.**member, key.least, kMost);
    } else if (const auto* number = std::get_if<double Config::*>(&key.member)) {
      TORCH_CHECK_VALUE(
          config.**number >= 0, key.name, " should be 0 or more, not ", config.**number);
      TORCH_CHECK_VALUE(
          config.**number <= kLargestNumber, key.name, " should be at most ", kLargestNumber,
          ", not ", config.**number);
    }
  }
  check_range("threads", config.threads, 0, 1024);
  check_range("heads", config.heads, 1, 65536);
  TORCH_CHECK_VALUE(
      config.warmup + config.warmdown <= config.steps, "warmup + warmdown should be at most ",
      config.steps, " steps, not ", config.warmup, " + ", config.warmdown,
      "; set --warmup and --warmdown as well");
  check_fraction("adamw-beta1", config.adamw_beta1);
  check_fraction("adamw-beta2", config.adamw_beta2);
  check_choice("device", config.device, {"cpu", "cuda"});
  check_choice(
      "engine", config.engine, {"auto", "portable", "neon", "avx2", "avx512", "avx512_bf16"});
  check_choice("precision", config.precision, {"auto", "bf16", "fp32"});
  check_choice("validation-precision", config.validation_precision, {"auto", "bf16", "fp32"});
  check_choice("qkv", config.qkv, {"split", "packed"});
  check_choice("reduction", config.reduction, {"fast", "ordered"});
  gpt::ModelShape shape = model_shape(config);
  if (shape.vocabulary == 0) shape.vocabulary = 1;  // not known yet
  gpt::check(shape);
  if (config.qkv == "packed") {
    TORCH_CHECK_VALUE(
        config.qk_group == "all" && config.k_group.empty() && config.v_group == "all",
        "qkv = packed has no head groups; remove qk-group, k-group and v-group");
  } else {
    const char* keys = "key and value";
    check_group(config, "qk-group", config.qk_group, shape.heads, "query");
    if (config.k_group.empty()) {
      check_group(config, "qk-group", config.qk_group, shape.key_heads(), keys);
    } else {
      check_group(config, "k-group", config.k_group, shape.key_heads(), keys);
    }
    check_group(config, "v-group", config.v_group, shape.key_heads(), keys);
  }
  group_muon::step_options(optimizer_options(config).muon);
  with_prefix("diagnose-groups", [&] { make_candidates(shape, config.diagnose_groups); });
}

gpt::ModelShape model_shape(const Config& config) {
  return {
      .layers = config.layers,
      .heads = config.heads,
      .kv_heads = config.kv_heads,
      .width = config.width,
      .context = config.context,
      .vocabulary = config.vocabulary,
      .qk_norm = config.qk_norm};
}

torch::ScalarType matmul_precision(const std::string& name) {
  TORCH_CHECK(name == "bf16" || name == "fp32", "precision ", name, " is not resolved yet");
  return name == "bf16" ? torch::kBFloat16 : torch::kFloat32;
}

Config with_engine(Config config) {
  const torch::Device device(config.device);
  const auto wanted = group_muon::parse_engine(config.engine);
  const auto muon = muon_on(device, config);
  config.muon.precision(std::string(group_muon::precision_name(muon.precision)))
      .engine(std::string(group_muon::to_string(muon.engine)))
      .method(std::string(group_muon::method_name(muon.method)));
  if (config.precision == "auto") {
    const bool bf16 = group_muon::default_precision(wanted, device) == torch::kBFloat16;
    config.precision = bf16 ? "bf16" : "fp32";
  }
  if (config.validation_precision == "auto") config.validation_precision = config.precision;
  const auto engine =
      group_muon::resolved_engine(wanted, device, matmul_precision(config.precision));
  config.engine = group_muon::to_string(engine);
  return config;
}

Config without_missing_engines(Config config) {
  for (auto* engine : {&config.engine, &config.muon.engine()}) {
    if (!group_muon::runs_here(group_muon::parse_engine(*engine))) *engine = "auto";
  }
  return config;
}

std::string software_bf16_note(const Config& config) {
  const bool wanted = config.precision == "bf16" || config.validation_precision == "bf16" ||
                      config.muon.precision() == "bfloat16";
  if (!wanted || group_muon::has_bf16(torch::Device(config.device))) return "";
  return "this run computes in bf16, which this CPU has only in software: a matrix product takes " +
         group_muon::bf16_cost() + " here";
}

group_muon::AssembleOptions optimizer_options(const Config& config) {
  group_muon::AssembleOptions options;
  options.muon = config.muon;
  options.muon.seed(config.seed);
  options.adamw = torch::optim::AdamWOptions(config.adamw_lr)
                      .betas({config.adamw_beta1, config.adamw_beta2})
                      .eps(config.adamw_eps)
                      .weight_decay(config.adamw_weight_decay);
  const auto layout = qkv_layout(config);
  if (layout != group_muon::plain()) options.layouts = {{"attn.c_attn.weight", layout}};
  return options;
}

void perturb(const std::vector<torch::Tensor>& weights, uint64_t seed) {
  const torch::NoGradGuard no_grad;
  const auto generator = at::detail::createCPUGenerator(seed);
  for (const auto& weight : weights) {
    const torch::Tensor sign =
        at::randint(0, 2, weight.sizes(), generator, at::TensorOptions(at::kFloat)) * 2 - 1;
    weight.mul_(1 + std::ldexp(1.0, -23) * sign.to(weight.device()));
  }
}

double lr_factor(const Config& config, int64_t step) {
  if (step < config.warmup) {
    return static_cast<double>(step + 1) / static_cast<double>(config.warmup);
  }
  if (step < config.steps - config.warmdown) return 1;
  return static_cast<double>(config.steps - step) / static_cast<double>(config.warmdown);
}

std::vector<std::string> unused_groupings(const Config& config) {
  std::vector<std::string> notes;
  for (const auto& [key, text] :
       {std::pair{"qk-group", config.qk_group},
        {"k-group", config.k_group},
        {"v-group", config.v_group}}) {
    if (text.empty()) continue;
    const auto schedule = group_muon::parse_schedule(text);
    const auto used = used_entries(schedule, config);
    for (size_t i = 0; i < schedule.size(); ++i) {
      const auto& entry = schedule[i];
      const bool reached = entry.from_step < config.steps;
      if (used[i] || (!reached && entry.every > 1)) continue;
      const std::string what =
          reached ? c10::str("'", group_muon::to_string({entry}), "' is never used")
                  : c10::str("step ", entry.from_step, " is never reached");
      notes.push_back(c10::str(key, " = ", text, ": ", what, "; steps = ", config.steps));
    }
  }
  return notes;
}

}  // namespace train
