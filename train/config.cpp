#include "train/config.h"

#define TOML_EXCEPTIONS 1
#include <toml++/toml.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <sstream>

namespace train {
namespace {

constexpr auto kRounding = OnChange::kRounding;
constexpr auto kFree = OnChange::kFree;

std::vector<Key> make_keys() {
  using C = Config;
  return {
      {"model", "layers", &C::layers, "Blocks"},
      {"model", "heads", &C::heads, "Query heads a block; they divide the width"},
      {"model", "kv-heads", &C::kv_heads, "Key and value heads; 0: as heads"},
      {"model", "width", &C::width, "Size of the residual stream"},
      {"model", "context", &C::context, "Tokens in a sequence"},
      {"model", "vocabulary", &C::vocabulary,
       "Entries; 0: those of the data's vocabulary.tiktoken, or else GPT-2's 50257"},
      {"model", "precision", &C::precision, "Of matrix products: bf16 or fp32; weights are fp32"},
      {"model", "init", &C::init, "Safetensors file to begin with; empty: random weights"},

      {"data", "data", &C::data, "Folder with *train*.bin and *val*.bin shards", kFree},
      {"data", "batch", &C::batch, "Sequences a step"},
      {"data", "micro-batch", &C::micro_batch,
       "Sequences at a time, gradients add up; 0: about 4096 tokens", kRounding},

      {"muon", "qkv", &C::qkv,
       "three-way: Q, K and V apart, in groups; packed: one matrix, no groups"},
      {"muon", "qk-group", &C::qk_group,
       "Head groups of Q and K: all, 2, 3:interval, 6:random, or a schedule 1@0,6:random@2000"},
      {"muon", "k-group", &C::k_group, "Head groups of K where they differ; empty: as qk-group"},
      {"muon", "v-group", &C::v_group, "Head groups of V"},
      {"muon", "share-qk", &C::share_qk, "Q and K of a layer draw the same random groups"},
      {"muon", "muon-lr", &C::muon_lr, "Learning rate of the blocks' matrices"},
      {"muon", "momentum", &C::momentum, "In [0, 1)"},
      {"muon", "nesterov", &C::nesterov, "Orthogonalize G + μM instead of M"},
      {"muon", "average", &C::average, "Momentum as average μM + (1-μ)G instead of as sum μM + G"},
      {"muon", "muon-weight-decay", &C::muon_weight_decay, "Decoupled"},
      {"muon", "method", &C::method, "newton_schulz, gram or exact"},
      {"muon", "coefficients", &C::coefficients, "quintic, polar_express or you"},
      {"muon", "iterations", &C::iterations, "Newton-Schulz iterations"},
      {"muon", "muon-precision", &C::muon_precision,
       "Of the iterations: bfloat16, float32, float64"},
      {"muon", "eps", &C::eps, "Guards the division by a block's norm"},
      {"muon", "relative-eps", &C::relative_eps, "Divide by norm·(1 + eps); false: by norm + eps"},
      {"muon", "base-scale", &C::base_scale,
       "Factor on the learning rate by shape: naive, keller_jordan, mup, moonlight, sqrt_max"},
      {"muon", "transfer", &C::transfer,
       "Rule from the reference shape to a block's: same (as base-scale), or one of its names"},
      {"muon", "reference", &C::reference,
       "The shape the learning rate is meant for: segment (Q, K or V) or matrix"},

      {"adamw", "adamw-lr", &C::adamw_lr, "Learning rate of the embedding, which is the head too"},
      {"adamw", "adamw-beta1", &C::adamw_beta1, "Decay of the mean"},
      {"adamw", "adamw-beta2", &C::adamw_beta2, "Decay of the mean square"},
      {"adamw", "adamw-eps", &C::adamw_eps, "Added to the root of the mean square"},
      {"adamw", "adamw-weight-decay", &C::adamw_weight_decay, "Decoupled"},

      {"schedule", "steps", &C::steps, "Optimizer steps"},
      {"schedule", "warmup", &C::warmup, "Steps over which learning rates rise; 0: none"},
      {"schedule", "warmdown", &C::warmdown, "Last steps, over which they fall linearly to 0"},
      {"schedule", "clip", &C::clip, "Scale gradients down to this global norm; 0: never"},
      {"schedule", "seed", &C::seed, "Of weights, random groups and the order of later epochs"},

      {"validation", "validation-interval", &C::validation_interval,
       "Steps from one validation to the next; also before the first and after the last step"},
      {"validation", "validation-tokens", &C::validation_tokens,
       "Tokens to validate on, always the same: the first of the split"},
      {"validation", "validation-precision", &C::validation_precision, "bf16 or fp32"},

      {"run", "out", &C::out, "Folder of the run; empty: runs/ and the time"},
      {"run", "checkpoint-interval", &C::checkpoint_interval,
       "Steps from one checkpoint to the next; 0: only after the last step", kFree},
      {"run", "keep", &C::keep, "Newest checkpoints to keep, besides the best", kFree},
      {"run", "log-interval", &C::log_interval, "Steps from one plain line to the next", kFree},
      {"run", "device", &C::device, "cpu or cuda", kRounding},
      {"run", "threads", &C::threads, "0: all cores", kRounding},
  };
}

// Levenshtein's distance.
size_t edits(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t above = row[j + 1];
      row[j + 1] = std::min({above + 1, row[j] + 1, diagonal + (a[i] == b[j] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

// Numbers are read and shown so that they come back the same.
template <typename Number>
Number parse_number(const Key& key, const std::string& text, const char* kind) {
  Number value{};
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  TORCH_CHECK_VALUE(
      error == std::errc() && rest == end, key.name, " should be ", kind, ", not '", text, "'");
  return value;
}

bool parse_bool(const Key& key, const std::string& text) {
  TORCH_CHECK_VALUE(
      text == "true" || text == "false", key.name, " should be true or false, not '", text, "'");
  return text == "true";
}

template <typename Number>
std::string show_number(Number value) {
  char digits[32];
  const auto [end, error] = std::to_chars(digits, digits + sizeof digits, value);
  return {digits, end};
}

std::string text_of(const toml::node& node, const std::string& name) {
  if (const auto* text = node.as_string()) return text->get();
  if (const auto* number = node.as_integer()) return show_number(number->get());
  if (const auto* number = node.as_floating_point()) return show_number(number->get());
  if (const auto* value = node.as_boolean()) return value->get() ? "true" : "false";
  TORCH_CHECK_VALUE(false, name, " should be a text, a number, true or false");
}

// A TOML string.
std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(c));
      out += escape;
      continue;
    }
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out += '"';
}

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

}  // namespace

const std::vector<Key>& config_keys() {
  static const std::vector<Key> keys = make_keys();
  return keys;
}

std::string nearest(std::string_view name, const std::vector<std::string>& candidates) {
  std::string best;
  size_t fewest = std::max<size_t>(2, name.size() / 2) + 1;
  for (const auto& candidate : candidates) {
    const size_t distance = edits(name, candidate);
    if (distance >= fewest) continue;
    fewest = distance;
    best = candidate;
  }
  return best;
}

const Key& find_key(std::string_view name) {
  std::vector<std::string> names;
  for (const auto& key : config_keys()) {
    if (name == key.name) return key;
    names.emplace_back(key.name);
  }
  const std::string near = nearest(name, names);
  TORCH_CHECK_VALUE(
      false, "there is no option '", name, "'",
      near.empty() ? std::string() : c10::str("; did you mean '", near, "'?"));
}

Settings read_settings(const std::string& path) {
  Settings settings;
  try {
    const toml::table file = toml::parse_file(path);
    for (const auto& [section, content] : file) {
      const auto* table = content.as_table();
      if (table == nullptr) {  // a key outside all tables is welcome too
        settings.emplace_back(find_key(section.str()).name, text_of(content, std::string(section)));
        continue;
      }
      for (const auto& [name, value] : *table) {
        const Key& key = find_key(name.str());
        TORCH_CHECK_VALUE(
            section.str() == key.section, "'", name.str(), "' belongs under [", key.section,
            "], not under [", section.str(), "]");
        settings.emplace_back(key.name, text_of(value, key.name));
      }
    }
  } catch (const toml::parse_error& error) {
    std::ostringstream where;
    where << error.source().begin;
    TORCH_CHECK_VALUE(false, "'", path, "': ", error.description(), " (", where.str(), ")");
  } catch (const c10::ValueError& error) {
    TORCH_CHECK_VALUE(false, "'", path, "': ", error.what_without_backtrace());
  }
  return settings;
}

void set(Config& config, const Key& key, const std::string& text) {
  std::visit(
      [&](auto member) {
        auto& value = config.*member;
        using Value = std::decay_t<decltype(value)>;
        if constexpr (std::is_same_v<Value, int64_t>) {
          value = parse_number<int64_t>(key, text, "a whole number");
        } else if constexpr (std::is_same_v<Value, double>) {
          value = parse_number<double>(key, text, "a number");
        } else if constexpr (std::is_same_v<Value, bool>) {
          value = parse_bool(key, text);
        } else {
          value = text;
        }
      },
      key.member);
}

std::string get(const Config& config, const Key& key) {
  return std::visit(
      [&](auto member) -> std::string {
        const auto& value = config.*member;
        using Value = std::decay_t<decltype(value)>;
        if constexpr (std::is_same_v<Value, std::string>) {
          return value;
        } else if constexpr (std::is_same_v<Value, bool>) {
          return value ? "true" : "false";
        } else {
          return show_number(value);
        }
      },
      key.member);
}

Config configure(const Settings& settings, Config config) {
  bool groups_given = false;
  for (const auto& [name, text] : settings) {
    set(config, find_key(name), text);
    groups_given |= name == "qk-group";
  }
  if (config.qkv == "packed" && !groups_given) config.qk_group = "all";
  return config;
}

Config reconfigure(
    const Config& config, const Settings& settings, std::vector<std::string>& notes) {
  const Config changed = configure(settings, config);
  for (const auto& key : config_keys()) {
    const std::string was = get(config, key), is = get(changed, key);
    if (was == is || key.on_change == OnChange::kFree) continue;
    TORCH_CHECK_VALUE(
        key.on_change == OnChange::kRounding, key.name, " = ", is, " conflicts with the run's ",
        was,
        "; a resumed run keeps its options. Leave it away, or start another run with another "
        "--out");
    notes.push_back(
        c10::str(key.name, " was ", was, " and is ", is, ": the run goes on, but not bit for bit"));
  }
  return changed;
}

std::string to_toml(const Config& config) {
  std::ostringstream file;
  const char* section = "";
  for (const auto& key : config_keys()) {
    if (std::string_view(section) != key.section) {
      file << (*section == '\0' ? "" : "\n") << "[" << key.section << "]\n";
      section = key.section;
    }
    file << key.name << " = ";
    if (std::holds_alternative<std::string Config::*>(key.member)) {
      file << quoted(get(config, key));
    } else {
      file << get(config, key);
    }
    file << "  # " << key.help << "\n";
  }
  return file.str();
}

void check(const Config& config) {
  const auto at_least = [&](int64_t least, std::initializer_list<const char*> names) {
    for (const auto* name : names) {
      const int64_t value = config.*std::get<int64_t Config::*>(find_key(name).member);
      TORCH_CHECK_VALUE(value >= least, name, " should be ", least, " or more, not ", value);
    }
  };
  at_least(1, {"batch", "steps", "validation-interval", "validation-tokens", "keep", "iterations"});
  at_least(1, {"log-interval"});
  at_least(
      0, {"micro-batch", "warmup", "warmdown", "checkpoint-interval", "threads", "vocabulary"});
  at_least(0, {"seed"});
  for (const auto& key : config_keys()) {
    const auto* member = std::get_if<double Config::*>(&key.member);
    if (member == nullptr) continue;
    TORCH_CHECK_VALUE(
        config.**member >= 0 && std::isfinite(config.**member), key.name,
        " should be 0 or more, not ", config.**member);
  }
  TORCH_CHECK_VALUE(
      config.warmup + config.warmdown <= config.steps, "warmup and warmdown should fit into ",
      config.steps, " steps, but they are ", config.warmup, " and ", config.warmdown);
  check_choice("precision", config.precision, {"bf16", "fp32"});
  check_choice("validation-precision", config.validation_precision, {"bf16", "fp32"});
  check_choice("qkv", config.qkv, {"three-way", "packed"});
  gpt::ModelShape shape = model_shape(config);
  if (shape.vocabulary == 0) shape.vocabulary = 1;  // not known yet
  gpt::check(shape);
  if (config.qkv == "packed") {
    TORCH_CHECK_VALUE(
        config.qk_group == "all" && config.k_group.empty() && config.v_group == "all",
        "qkv = packed has no head groups; leave qk-group, k-group and v-group away");
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
