#pragma once
// All options of a training run. Each is declared once, with its default, help and section in a TOML file; the
// optimizer's come from the library's list. The flags of `group-muon train` have the same names.

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "group_muon/options.h"
#include "group_muon/text.h"

namespace train {

/// Defaults are the paper's setting (GPT-2 Small); see configs/gpt2-paper.toml.
struct Config {
  // model
  int64_t layers = 12;
  int64_t heads = 12;
  int64_t kv_heads = 0;
  int64_t width = 768;
  int64_t context = 1024;
  int64_t vocabulary = 0;
  bool qk_norm = false;
  std::string precision = "auto";
  std::string init;
  // data
  std::string data;
  int64_t batch = 512;
  int64_t micro_batch = 0;
  bool shuffle = false;
  // muon
  std::string qkv = "split";
  std::string qk_group = "6:random";
  std::string k_group;
  std::string v_group = "all";
  bool share_qk = false;
  double qkv_lr = 1;
  group_muon::GroupMuonOptions muon;  // some of them follow from other keys (config.cpp)
  // adamw
  double adamw_lr = 3.6e-3;
  double adamw_beta1 = 0.9;
  double adamw_beta2 = 0.95;
  double adamw_eps = 1e-8;
  double adamw_weight_decay = 0;
  // schedule
  int64_t steps = 6200;
  int64_t warmup = 0;
  int64_t warmdown = 1800;
  double clip = 0;
  int64_t seed = 0;
  int64_t perturb = 0;
  // validation
  int64_t validation_interval = 125;
  int64_t validation_tokens = 10485760;
  std::string validation_precision = "auto";
  // diagnostics
  int64_t diagnose_every = 0;
  std::string diagnose_groups;
  bool diagnose_exact = false;
  // run
  std::string out;
  int64_t checkpoint_interval = 1000;
  int64_t keep = 2;
  int64_t log_interval = 10;
  std::string device = "cpu";
  std::string engine = "auto";
  int64_t threads = 0;
  std::string reduction = "fast";

  bool operator==(const Config&) const = default;
};

/// What happens when a run is resumed with a different value.
enum class OnChange {
  kRefused,   // rejected: it would be a different run
  kRounding,  // the same run, up to rounding
  kFree,      // the same run, bit for bit
};

/// A field of Config, or an option of Config::muon.
using Member = std::variant<
    int64_t Config::*, double Config::*, bool Config::*, std::string Config::*,
    const group_muon::Option*>;

struct Key {
  const char* section;
  std::string name;
  Member member;
  std::string help;
  int64_t least = 1;  // minimum of an integer; other numbers must be 0 or more
  OnChange on_change = OnChange::kRefused;
};

/// All keys, in file order.
const std::vector<Key>& config_keys();

/// The key with this name. If there is none, the error suggests the nearest name.
const Key& find_key(std::string_view name);

/// Keys and values, as text, in the order given on a command line or in a file.
using Options = std::vector<std::pair<std::string, std::string>>;

/// The options in a TOML file, in the order of config_keys(). Tables are sections.
Options read_options(const std::string& path);

/// What the key's values are. Lists are text.
enum class Type { kNumber, kSwitch, kText };
Type type_of(const Key& key);

/// Sets a key from text. Errors name the key.
void set(Config& config, const Key& key, const std::string& text);
std::string get(const Config& config, const Key& key);

/// All keys with the values they have in the config.
Options options_of(const Config& config);

/// Applies the options to the config; later ones win. `qkv = packed` clears head groups set before it.
Config configure(const Options& options, Config config = {});

/// Checks that a run with config `was` can be resumed with config `is`. Rejects changes that would make it a
/// different run, naming the key, and returns notes on changes that affect rounding.
std::vector<std::string> compare_for_resume(const Config& was, const Config& is);

/// All keys as a TOML file, with sections and help. Rejects strings that TOML cannot hold.
std::string to_toml(const Config& config);

using group_muon::nearest;

}  // namespace train
