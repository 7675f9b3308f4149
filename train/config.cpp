#include "train/config.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <sstream>

#include "group_muon/text.h"
#include "train/toml_file.h"

namespace train {
namespace {

constexpr auto kRounding = OnChange::kRounding;
constexpr auto kFree = OnChange::kFree;

// Options of the optimizer that have another name here, or another meaning.
struct MuonKey {
  const char* option;
  const char* name;
  const char* help = nullptr;
  OnChange on_change = OnChange::kRefused;
};
constexpr MuonKey kMuonKeys[] = {
    {"lr", "muon-lr"},
    {"weight_decay", "muon-weight-decay"},
    {"steps", "iterations"},
    {"precision", "muon-precision"},
    {"engine", "muon-engine",
     "Engine of the optimizer; auto: as engine if it fits muon-precision, else the CPU's best",
     kRounding},
};
// Options of the optimizer that follow from other keys.
constexpr std::string_view kNoMuonKeys[] = {"layout", "names", "partitions", "seed", "full_lr"};

// Appends a key for each option in the library's list.
void add_muon_keys(std::vector<Key>& keys) {
  for (const auto& option : group_muon::option_list()) {
    const std::string_view name = option.name;
    if (std::find(std::begin(kNoMuonKeys), std::end(kNoMuonKeys), name) != std::end(kNoMuonKeys)) {
      continue;
    }
    Key key{"muon", option.name, &option, option.help};
    std::replace(key.name.begin(), key.name.end(), '_', '-');
    key.help[0] = static_cast<char>(std::toupper(key.help[0]));
    for (const auto& other : kMuonKeys) {
      if (name != other.option) continue;
      key.name = other.name;
      if (other.help != nullptr) key.help = other.help;
      key.on_change = other.on_change;
    }
    keys.push_back(std::move(key));
  }
}

std::vector<Key> make_keys() {
  using C = Config;
  std::vector<Key> keys = {
      {"model", "layers", &C::layers, "Number of transformer blocks"},
      {"model", "heads", &C::heads, "Number of query heads per block; must divide the width"},
      {"model", "kv-heads", &C::kv_heads, "Number of key and value heads; 0: same as heads", 0},
      {"model", "width", &C::width, "Size of the residual stream"},
      {"model", "context", &C::context, "Sequence length in tokens"},
      {"model", "vocabulary", &C::vocabulary,
       "Vocabulary size; 0: from the data's vocabulary.tiktoken, or GPT-2's 50257 without one", 0},
      {"model", "qk-norm", &C::qk_norm,
       "RMS-normalize each query and key head before rotary positions, as modded-nanogpt does"},
      {"model", "precision", &C::precision,
       "Precision of matrix products (weights are fp32): bf16, fp32, or auto (bf16 if the "
       "hardware has it)"},
      {"model", "init", &C::init,
       "Run, checkpoint or safetensors file with initial weights; empty: random weights"},

      {"data", "data", &C::data, "Folder with *train*.bin and *val*.bin shards", 1, kFree},
      {"data", "batch", &C::batch, "Sequences per step"},
      {"data", "micro-batch", &C::micro_batch,
       "Sequences per forward and backward pass (gradients add up); 0: about 4096 tokens", 0,
       kRounding},
      {"data", "shuffle", &C::shuffle,
       "Shuffle the first epoch too, by the seed; false: first epoch in shard order"},

      {"muon", "qkv", &C::qkv,
       "split: Q, K and V separately, in head groups; packed: QKV as one matrix, no groups"},
      {"muon", "qk-group", &C::qk_group,
       "Head groups of Q and K: all, 2, 3:interval, 6:random*0.5 (half the learning rate), "
       "6:random~all/5 (every fifth step whole), or a schedule 1@0,6:random@2000 or "
       "1,6:random@0.5lr"},
      {"muon", "k-group", &C::k_group, "Head groups of K if different; empty: same as qk-group"},
      {"muon", "v-group", &C::v_group, "Head groups of V, in the same form as qk-group"},
      {"muon", "share-qk", &C::share_qk,
       "Use the same random groups for Q and K of a layer; no effect if packed"},
  };
  add_muon_keys(keys);
  const std::vector<Key> others = {
      // Behind muon-lr, which someone who says lr means.
      {"muon", "qkv-lr", &C::qkv_lr,
       "Factor on muon-lr for Q, K and V alone, split or packed; multiplies factors in head "
       "groups"},

      {"adamw", "adamw-lr", &C::adamw_lr,
       "Learning rate of the embedding, which is also the output head"},
      {"adamw", "adamw-beta1", &C::adamw_beta1, "Decay rate of the mean gradient"},
      {"adamw", "adamw-beta2", &C::adamw_beta2, "Decay rate of the mean squared gradient"},
      {"adamw", "adamw-eps", &C::adamw_eps, "Added to the root of the mean squared gradient"},
      {"adamw", "adamw-weight-decay", &C::adamw_weight_decay,
       "Decoupled weight decay of the embedding"},

      {"schedule", "steps", &C::steps, "Number of optimizer steps"},
      {"schedule", "warmup", &C::warmup,
       "Number of first steps over which learning rates rise linearly; 0: none", 0},
      {"schedule", "warmdown", &C::warmdown,
       "Number of last steps over which learning rates fall linearly to 0; 0: none", 0},
      {"schedule", "clip", &C::clip, "Scale gradients down to this global norm; 0: no clipping"},
      {"schedule", "seed", &C::seed, "Seed of initial weights, random groups and data order", 0},
      {"schedule", "perturb", &C::perturb,
       "Move each initial weight by one rounding error, drawn from this seed, to measure noise; "
       "0: off",
       0},

      {"validation", "validation-interval", &C::validation_interval,
       "Steps between validations; also validates before the first and after the last step"},
      {"validation", "validation-tokens", &C::validation_tokens,
       "Number of validation tokens, taken from the start of the split"},
      {"validation", "validation-precision", &C::validation_precision,
       "Precision of validation: bf16, fp32, or auto (same as precision)"},

      {"diagnostics", "diagnose-every", &C::diagnose_every,
       "Steps between measurements of the gain and cost of head groups; 0: never", 0, kFree},
      {"diagnostics", "diagnose-groups", &C::diagnose_groups,
       "Groupings to measure, such as 1,6:random,6:random/all (V whole); empty: every size, random",
       1, kFree},
      {"diagnostics", "diagnose-exact", &C::diagnose_exact,
       "Use exact singular values; false: estimates from XXᵀ, good to 3e-7 of the largest", 1,
       kFree},

      {"run", "out", &C::out, "Folder of the run; empty: runs/ plus the time"},
      {"run", "checkpoint-interval", &C::checkpoint_interval,
       "Steps between checkpoints; 0: only after the last step", 0, kFree},
      {"run", "keep", &C::keep, "Number of newest checkpoints to keep, plus the best", 1, kFree},
      {"run", "log-interval", &C::log_interval,
       "Steps between log lines when the output is not a terminal", 1, kFree},
      {"run", "device", &C::device, "Device: cpu or cuda", 1, kRounding},
      {"run", "engine", &C::engine,
       "Engine of model and Gram methods: portable (libtorch), neon, avx2, avx512, avx512_bf16, or "
       "auto (best)",
       1, kRounding},
      {"run", "threads", &C::threads,
       "Number of threads; 0: one per core, shared out if torchrun starts several processes", 0,
       kRounding},
      {"run", "reduction", &C::reduction,
       "How gradients are added up. fast: as they come; ordered: in one fixed order, so that 1, 2, "
       "4 … processes give the same bits, for a copy of the gradient per halving of the batch",
       1, kRounding},
  };
  keys.insert(keys.end(), others.begin(), others.end());
  return keys;
}

// Key in runs from before there were several engines; its values are native and portable.
constexpr const char* kOldEngineKey = "kernels";

// The current name of a value that runs of earlier versions may contain.
std::string renamed(std::string_view key, const std::string& value) {
  if (key == "qkv" && value == "three-way") return "split";
  if (key == "coefficients" && value == "you") return "you_jiacheng";
  return value;
}

// Numbers survive a round trip through text exactly.
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

// A TOML string.
std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
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

Options options_in(const toml::table& file) {
  for (const auto& [section, content] : file) {  // reject unknown and misplaced keys
    const auto* table = content.as_table();
    if (table == nullptr) {
      TORCH_CHECK_VALUE(
          false, "'", section.str(), "' belongs under [", find_key(section.str()).section, "]");
    }
    for (const auto& [name, value] : *table) {
      if (name.str() == kOldEngineKey && section.str() == "run") continue;
      const Key& key = find_key(name.str());
      TORCH_CHECK_VALUE(
          section.str() == key.section, "'", name.str(), "' belongs under [", key.section,
          "], not under [", section.str(), "]");
    }
  }
  Options options;
  if (const auto old = file["run"][kOldEngineKey]) {
    const std::string word = text_of(*old.node(), kOldEngineKey);
    options.emplace_back("engine", word == "native" ? "avx512_bf16" : word);
  }
  for (const auto& key : config_keys()) {
    const auto value = file[key.section][key.name];
    if (value) options.emplace_back(key.name, text_of(*value.node(), key.name));
  }
  return options;
}

}  // namespace

Type type_of(const Key& key) {
  if (const auto* option = std::get_if<const group_muon::Option*>(&key.member)) {
    const std::string_view type = (*option)->type;
    return type == "bool"                     ? Type::kSwitch
           : type == "int" || type == "float" ? Type::kNumber
                                              : Type::kText;
  }
  if (std::holds_alternative<bool Config::*>(key.member)) return Type::kSwitch;
  return std::holds_alternative<std::string Config::*>(key.member) ? Type::kText : Type::kNumber;
}

const std::vector<Key>& config_keys() {
  static const std::vector<Key> keys = make_keys();
  return keys;
}

const Key& find_key(std::string_view name) {
  std::vector<std::string> names;
  for (const auto& key : config_keys()) {
    if (name == key.name) return key;
    names.emplace_back(key.name);
  }
  TORCH_CHECK_VALUE(name != kOldEngineKey, "option '", kOldEngineKey, "' was renamed to 'engine'");
  const std::string near = nearest(name, names);
  TORCH_CHECK_VALUE(
      false, "there is no option '", name, "'",
      near.empty() ? std::string() : c10::str("; did you mean '", near, "'?"));
}

std::string text_of(const toml::node& node, const std::string& name) {
  if (const auto* text = node.as_string()) return text->get();
  if (const auto* number = node.as_integer()) return group_muon::to_text(number->get());
  if (const auto* number = node.as_floating_point()) return group_muon::to_text(number->get());
  if (const auto* value = node.as_boolean()) return value->get() ? "true" : "false";
  TORCH_CHECK_VALUE(false, name, " should be a string, a number, true or false");
}

Options read_options(const std::string& path) {
  return read_toml(path, [](const toml::table& file) {
    const Options options = options_in(file);
    configure(options);  // errors in values then name the file
    return options;
  });
}

void set(Config& config, const Key& key, const std::string& text) {
  std::visit(
      [&](auto member) {
        using M = decltype(member);
        if constexpr (std::is_same_v<M, const group_muon::Option*>) {
          member->set(config.muon, renamed(key.name, text), key.name);
        } else if constexpr (std::is_same_v<M, int64_t Config::*>) {
          config.*member = parse_number<int64_t>(key, text, "a whole number");
        } else if constexpr (std::is_same_v<M, double Config::*>) {
          config.*member = parse_number<double>(key, text, "a number");
        } else if constexpr (std::is_same_v<M, bool Config::*>) {
          config.*member = parse_bool(key, text);
        } else {
          config.*member = renamed(key.name, text);
        }
      },
      key.member);
}

std::string get(const Config& config, const Key& key) {
  return std::visit(
      [&](auto member) -> std::string {
        using M = decltype(member);
        if constexpr (std::is_same_v<M, const group_muon::Option*>) {
          return member->get(config.muon);
        } else if constexpr (std::is_same_v<M, std::string Config::*>) {
          return config.*member;
        } else if constexpr (std::is_same_v<M, bool Config::*>) {
          return config.*member ? "true" : "false";
        } else {
          return group_muon::to_text(config.*member);
        }
      },
      key.member);
}

Options options_of(const Config& config) {
  Options options;
  for (const auto& key : config_keys()) options.emplace_back(key.name, get(config, key));
  return options;
}

Config configure(const Options& options, Config config) {
  for (const auto& [name, text] : options) {
    set(config, find_key(name), text);
    if (name != "qkv" || text != "packed") continue;
    config.qk_group = config.v_group = "all";
    config.k_group.clear();
  }
  return config;
}

std::vector<std::string> compare_for_resume(const Config& was, const Config& is) {
  std::vector<std::string> notes;
  for (const auto& key : config_keys()) {
    const std::string before = get(was, key), now = get(is, key);
    if (before == now || key.on_change == OnChange::kFree) continue;
    TORCH_CHECK_VALUE(
        key.on_change == OnChange::kRounding, key.name, " = ", now, " conflicts with the run's ",
        before);
    notes.push_back(
        c10::str(
            key.name, " changed from ", before, " to ", now,
            ": the run continues, but not bit for bit"));
  }
  return notes;
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
    if (type_of(key) == Type::kText) {
      file << quoted(get(config, key));
    } else {
      file << get(config, key);
    }
    file << "  # " << key.help << "\n";
  }
  const std::string text = file.str();
  bool same = false;
  try {
    same = configure(options_in(toml::parse(text))) == config;
  } catch (const toml::parse_error&) {
    same = false;
  }
  TORCH_CHECK_VALUE(
      same, "a path or string has characters that a TOML file cannot hold (not UTF-8?)");
  return text;
}

}  // namespace train
