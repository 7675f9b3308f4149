#include "study/plan.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <functional>
#include <sstream>

#include "train/toml_file.h"

namespace study {
namespace {

namespace fs = std::filesystem;

// Rejects unknown keys.
void check_words(const toml::table& table, const std::vector<std::string>& known) {
  for (const auto& [word, value] : table) {
    const std::string name(word.str());
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    const std::string near = train::nearest(name, known);
    TORCH_CHECK_VALUE(
        false, "there is no key '", name, "' here",
        near.empty() ? std::string() : c10::str("; did you mean '", near, "'?"));
  }
}

int64_t seeds_of(const toml::node& node, const std::string& name) {
  const auto* number = node.as_integer();
  TORCH_CHECK_VALUE(
      number != nullptr && number->get() >= 1 && number->get() <= 1000, name,
      " should be a whole number from 1 to 1000");
  return number->get();
}

std::string name_of(const toml::node& node, const std::string& what) {
  const auto* text = node.as_string();
  TORCH_CHECK_VALUE(text != nullptr, what, " should be a string");
  return text->get();
}

std::vector<const Setting*> known_settings(const Study& study) {
  std::vector<const Setting*> all;
  for (const auto& setting : table1_settings()) all.push_back(&setting);
  for (const auto& setting : study.own_settings) all.push_back(&setting);
  return all;
}

// A list of setting names, or "table1" for all of them.
std::vector<std::string> settings_of(const toml::node& node, const Study& study) {
  std::vector<std::string> names;
  if (node.is_string() && node.as_string()->get() == "table1") {
    for (const auto& setting : table1_settings()) names.push_back(setting.name);
    return names;
  }
  const auto* list = node.as_array();
  TORCH_CHECK_VALUE(
      list != nullptr && !list->empty(), "settings should be \"table1\" or a list of names");
  for (const auto& item : *list) {
    names.push_back(find_setting(study, name_of(item, "a setting")).name);
    TORCH_CHECK_VALUE(
        std::count(names.begin(), names.end(), names.back()) == 1, "setting '", names.back(),
        "' is listed twice");
  }
  return names;
}

std::string absolute(const fs::path& folder, const std::string& path) {
  return path.empty() ? path : fs::absolute(folder / path).lexically_normal().string();
}

// Why a key of `group-muon train` cannot be set for all runs, or nullptr if it can.
const char* why_not(std::string_view key) {
  for (const char* own : {"out", "data", "seed", "threads", "perturb"}) {
    if (key == own) return "is set on the command line or differs between runs";
  }
  for (const char* own : {"qkv", "qk-group", "k-group", "v-group"}) {
    if (key == own) return "is part of a setting";
  }
  return nullptr;
}

const char* why_not_of_all(const train::Key& key) { return why_not(key.name); }

// Why a key cannot be part of a setting, or nullptr if it can.
const char* why_not_of_a_setting(const train::Key& key) {
  const std::string section = key.section;
  return section == "muon" || section == "adamw"
             ? nullptr
             : "is not an optimizer option, and settings may differ only in those";
}

// Why a key cannot be tuned for a setting, or nullptr if it can.
const char* why_not_tuned(const train::Key& key) {
  const char* why = why_not_of_all(key);
  return why != nullptr ? why : why_not_of_a_setting(key);
}

// Options of `group-muon train`, checked one by one.
train::Options options_of(
    const toml::table& table, const fs::path& folder,
    const std::function<const char*(const train::Key&)>& refuse) {
  train::Options options;
  for (const auto& [word, value] : table) {
    const auto& key = train::find_key(word.str());
    const char* why = refuse(key);
    TORCH_CHECK_VALUE(why == nullptr, "'", key.name, "' is not allowed here: it ", why);
    std::string text = train::text_of(value, key.name);
    if (std::string_view(key.name) == "init") text = absolute(folder, text);
    options.emplace_back(key.name, text);
    train::configure({options.back()});
  }
  return options;
}

// A configuration file of `group-muon train`, without the options that the study decides.
train::Options base_of(const fs::path& path) {
  train::Options options;
  for (auto [key, value] : train::read_options(path.string())) {
    if (why_not(key) != nullptr) continue;
    if (key == "init" && !value.empty()) value = fs::absolute(value).lexically_normal().string();
    options.emplace_back(key, value);
  }
  return options;
}

// Checks a name that becomes a folder and a command-line argument.
void check_name(const std::string& name, const char* what) {
  const auto plain = [](unsigned char c) { return std::isalnum(c) != 0 || c == '-' || c == '_'; };
  TORCH_CHECK_VALUE(
      !name.empty() && name.size() <= 64 && std::all_of(name.begin(), name.end(), plain) &&
          name.front() != '-',
      what,
      " becomes a folder, so it should have 1 to 64 letters, digits, - and _ and not start "
      "with -, unlike '",
      name, "'");
  for (const char* taken : {kNoiseVariant, "report", "lock"}) {
    TORCH_CHECK_VALUE(
        name != taken, what, " cannot be '", name, "': the study uses that name itself");
  }
}

// For names such as qk-5-random: which group sizes the table has, and how to study others.
std::string group_size_hint(const std::string& name) {
  constexpr std::array<std::string_view, 5> kSizes = {"1", "2", "3", "4", "6"};
  for (const std::string_view prefix : {"qk-", "v-", "fixed-qk-v-"}) {
    if (name.rfind(prefix, 0) != 0) continue;
    const std::string rest = name.substr(prefix.size());
    const std::string size = rest.substr(0, rest.find_first_not_of("0123456789"));
    if (size.empty() || std::find(kSizes.begin(), kSizes.end(), size) != kSizes.end()) continue;
    return " Table 1 has groups of 1, 2, 3, 4 and 6 heads; define others under own-settings";
  }
  return "";
}

// Prefixes errors with what they are about.
template <class Action>
auto within(const std::string& what, const Action& action) {
  try {
    return action();
  } catch (const c10::Error& error) {
    TORCH_CHECK_VALUE(false, what, ": ", error.what_without_backtrace());
  }
}

const toml::table& table_of(const toml::node& node, const std::string& name) {
  const auto* table = node.as_table();
  TORCH_CHECK_VALUE(table != nullptr, name, " should be a table");
  return *table;
}

const toml::array& tables_of(const toml::node& node, const std::string& name) {
  const auto* list = node.as_array();
  TORCH_CHECK_VALUE(list != nullptr, name, " should be an array of tables, [[", name, "]]");
  return *list;
}

Setting own_setting_of(const toml::table& table, const fs::path& folder) {
  TORCH_CHECK_VALUE(table.contains("name"), "a setting in own-settings needs a name");
  Setting setting;
  setting.name = setting.title = name_of(*table.get("name"), "a setting's name");
  check_name(setting.name, "a setting's name");
  within("setting '" + setting.name + "'", [&] {
    check_words(table, {"name", "options"});
    const auto* options = table.get("options");
    TORCH_CHECK_VALUE(options != nullptr, "it needs options");
    setting.options = options_of(table_of(*options, "options"), folder, why_not_of_a_setting);
    TORCH_CHECK_VALUE(!setting.options.empty(), "it needs options");
    // qkv = packed resets the groups given before it. It comes first, so that groups in the same setting are noticed.
    std::stable_partition(setting.options.begin(), setting.options.end(), [](const auto& option) {
      return option.first == "qkv";
    });
    return 0;
  });
  return setting;
}

void check_apart(const train::Options& options, const Study& study, const std::string& setting) {
  for (const auto& [key, value] : setting_options(study, setting)) {
    for (const auto& [other, text] : options) {
      TORCH_CHECK_VALUE(key != other, "setting '", setting, "' sets ", key, " as well");
    }
  }
}

Variant variant_of(const toml::table& table, const fs::path& folder, const Study& study) {
  TORCH_CHECK_VALUE(table.contains("name"), "a variant needs a name");
  Variant variant;
  variant.name = name_of(*table.get("name"), "a variant's name");
  check_name(variant.name, "a variant's name");
  within("variant '" + variant.name + "'", [&] {
    check_words(table, {"name", "settings", "seeds", "options"});
    TORCH_CHECK_VALUE(
        table.contains("settings") && table.contains("options"), "it needs settings and options");
    variant.settings = settings_of(*table.get("settings"), study);
    variant.options =
        options_of(table_of(*table.get("options"), "options"), folder, why_not_of_all);
    for (const auto& name : variant.settings) check_apart(variant.options, study, name);
    if (table.contains("seeds")) variant.seeds = seeds_of(*table.get("seeds"), "seeds");
    return 0;
  });
  return variant;
}

bool has_setting(const Study& study, const std::string& name) {
  return std::find(study.settings.begin(), study.settings.end(), name) != study.settings.end();
}

int64_t seeds_of_setting(const Study& study, const std::string& setting) {
  const auto more = study.more_seeds.find(setting);
  return more == study.more_seeds.end() ? study.seeds : std::max(study.seeds, more->second);
}

constexpr int64_t kMostRuns = 100'000;

int64_t count_runs(const Study& study) {
  int64_t count = study.noise_seeds;
  for (const auto& setting : study.settings) count += seeds_of_setting(study, setting);
  for (const auto& variant : study.variants) {
    count += static_cast<int64_t>(variant.settings.size()) * variant.seeds;
  }
  return count;
}

void read_more_seeds(const toml::table& table, Study& study) {
  for (const auto& [name, value] : table) {
    const std::string setting = find_setting(study, std::string(name.str())).name;
    TORCH_CHECK_VALUE(
        has_setting(study, setting), "more-seeds: '", setting, "' is not among the settings");
    study.more_seeds[setting] = seeds_of(value, setting);
    TORCH_CHECK_VALUE(
        study.more_seeds[setting] >= study.seeds, "more-seeds: '", setting, "' already has ",
        study.seeds, " seeds, like every setting");
  }
}

void read_tuned(const toml::table& table, const fs::path& folder, Study& study) {
  for (const auto& [name, value] : table) {
    const std::string setting = find_setting(study, std::string(name.str())).name;
    const auto& own = value;  // clang 14 does not capture bindings
    within("tuned setting '" + setting + "'", [&] {
      const auto options = options_of(table_of(own, "it"), folder, why_not_tuned);
      check_apart(options, study, setting);
      study.tuned[setting] = options;
      return 0;
    });
  }
}

int64_t first_seed_of(const toml::node& node) {
  constexpr int64_t kHighest = 1'000'000;
  const auto* number = node.as_integer();
  TORCH_CHECK_VALUE(
      number != nullptr && number->get() >= 0 && number->get() <= kHighest,
      "first-seed should be a whole number from 0 to ", kHighest);
  return number->get();
}

void read_own_settings(const toml::node& node, const fs::path& folder, Study& study) {
  for (const auto& item : tables_of(node, "own-settings")) {
    auto setting = own_setting_of(table_of(item, "a setting"), folder);
    for (const auto* other : known_settings(study)) {
      TORCH_CHECK_VALUE(
          other->name != setting.name, "there is already a setting '", other->name, "'");
    }
    study.own_settings.push_back(std::move(setting));
  }
}

void read_variants(const toml::node& node, const fs::path& folder, Study& study) {
  for (const auto& item : tables_of(node, "variants")) {
    auto variant = variant_of(table_of(item, "a variant"), folder, study);
    for (const auto& other : study.variants) {
      TORCH_CHECK_VALUE(other.name != variant.name, "there are two variants '", variant.name, "'");
    }
    study.variants.push_back(std::move(variant));
  }
}

void read_noise(const toml::table& table, Study& study) {
  check_words(table, {"setting", "seeds"});
  TORCH_CHECK_VALUE(
      table.contains("setting") && table.contains("seeds"), "noise needs a setting and seeds");
  study.noise_setting = find_setting(study, name_of(*table.get("setting"), "setting")).name;
  study.noise_seeds = seeds_of(*table.get("seeds"), "seeds");
  TORCH_CHECK_VALUE(
      has_setting(study, study.noise_setting) &&
          study.noise_seeds <= seeds_of_setting(study, study.noise_setting),
      "noise is measured against the same seeds of '", study.noise_setting,
      "', which the study does not have");
}

Study study_of(const toml::table& file, const fs::path& folder) {
  TORCH_CHECK_VALUE(
      file.contains("settings") || !(file.contains("model") || file.contains("muon")),
      "this is a configuration file of group-muon train, not a study; use it as the base of a "
      "study");
  check_words(
      file, {"data", "keep-checkpoints", "base", "settings", "own-settings", "seeds", "first-seed",
             "options", "more-seeds", "tuned", "variants", "noise"});
  Study study;
  if (const auto* data = file.get("data")) study.data = absolute(folder, name_of(*data, "data"));
  if (const auto* node = file.get("keep-checkpoints")) {
    const auto* keep = node->as_boolean();
    TORCH_CHECK_VALUE(keep != nullptr, "keep-checkpoints should be true or false");
    study.keep_checkpoints = keep->get();
  }
  if (const auto* base = file.get("base")) study.options = base_of(folder / name_of(*base, "base"));
  if (const auto* options = file.get("options")) {
    const auto own = options_of(table_of(*options, "options"), folder, why_not_of_all);
    study.options.insert(study.options.end(), own.begin(), own.end());
  }
  TORCH_CHECK_VALUE(
      file.contains("settings"), "no settings given; set settings = \"table1\" or a list of names");
  if (const auto* own = file.get("own-settings")) read_own_settings(*own, folder, study);
  study.settings = settings_of(*file.get("settings"), study);
  for (const auto& own : study.own_settings) {
    if (!has_setting(study, own.name)) study.settings.push_back(own.name);
  }
  if (const auto* seeds = file.get("seeds")) study.seeds = seeds_of(*seeds, "seeds");
  if (const auto* more = file.get("more-seeds")) {
    read_more_seeds(table_of(*more, "more-seeds"), study);
  }
  if (const auto* first = file.get("first-seed")) study.first_seed = first_seed_of(*first);
  if (const auto* tuned = file.get("tuned")) read_tuned(table_of(*tuned, "tuned"), folder, study);
  if (const auto* variants = file.get("variants")) read_variants(*variants, folder, study);
  if (const auto* noise = file.get("noise")) read_noise(table_of(*noise, "noise"), study);
  return study;
}

}  // namespace

Study read_study(const std::string& path) {
  return train::read_toml(
      path, [&](const toml::table& file) { return study_of(file, fs::path(path).parent_path()); });
}

const Setting& find_setting(const Study& study, const std::string& name) {
  std::vector<std::string> names;
  for (const auto* setting : known_settings(study)) {
    if (setting->name == name) return *setting;
    names.push_back(setting->name);
  }
  const std::string near = train::nearest(name, names);
  TORCH_CHECK_VALUE(
      false, "there is no setting '", name, "'",
      near.empty() ? std::string() : c10::str("; did you mean ", near, "?"), group_size_hint(name));
}

train::Options setting_options(const Study& study, const std::string& setting) {
  auto options = find_setting(study, setting).options;
  if (const auto tuned = study.tuned.find(setting); tuned != study.tuned.end()) {
    options.insert(options.end(), tuned->second.begin(), tuned->second.end());
  }
  return options;
}

std::string to_toml(const Study& study) {
  const auto list = [](const std::vector<std::string>& names) {
    toml::array items;
    for (const auto& name : names) items.push_back(name);
    return items;
  };
  const auto table = [](const auto& pairs) {
    toml::table items;
    for (const auto& [name, value] : pairs) items.insert_or_assign(name, value);
    return items;
  };
  toml::table file;
  if (!study.data.empty()) file.insert("data", study.data);
  file.insert("keep-checkpoints", study.keep_checkpoints);
  file.insert("settings", list(study.settings));
  file.insert("seeds", study.seeds);
  file.insert("first-seed", study.first_seed);
  file.insert("options", table(study.options));
  file.insert("more-seeds", table(study.more_seeds));
  if (study.noise_seeds > 0) {
    file.insert(
        "noise", toml::table{{"setting", study.noise_setting}, {"seeds", study.noise_seeds}});
  }
  toml::table tuned;
  for (const auto& [name, options] : study.tuned) tuned.insert(name, table(options));
  if (!tuned.empty()) file.insert("tuned", std::move(tuned));
  toml::array own;
  for (const auto& setting : study.own_settings) {
    own.push_back(toml::table{{"name", setting.name}, {"options", table(setting.options)}});
  }
  if (!own.empty()) file.insert("own-settings", std::move(own));
  toml::array variants;
  for (const auto& variant : study.variants) {
    variants.push_back(
        toml::table{
            {"name", variant.name},
            {"settings", list(variant.settings)},
            {"seeds", variant.seeds},
            {"options", table(variant.options)}});
  }
  if (!variants.empty()) file.insert("variants", std::move(variants));
  std::ostringstream text;
  text << file << "\n";
  return text.str();
}

std::vector<PlannedRun> make_plan(const Study& study) {
  const int64_t count = count_runs(study);
  TORCH_CHECK_VALUE(
      count <= kMostRuns, "the study has ", count, " runs; at most ", kMostRuns,
      " are allowed. Use fewer settings, variants or seeds");
  std::vector<PlannedRun> plan;
  const auto add = [&](const std::string& setting, const std::string& variant, int64_t seed,
                       const train::Options& more) {
    PlannedRun run;
    run.name = c10::str(variant, variant.empty() ? "" : "/", setting, "/seed-", seed);
    run.setting = setting;
    run.variant = variant;
    run.seed = seed;
    run.options = study.options;
    for (const auto& list : {more, setting_options(study, setting)}) {
      run.options.insert(run.options.end(), list.begin(), list.end());
    }
    run.options.emplace_back("seed", std::to_string(seed));
    plan.push_back(std::move(run));
  };
  int64_t most = study.noise_seeds;
  for (const auto& setting : study.settings)
    most = std::max(most, seeds_of_setting(study, setting));
  for (const auto& variant : study.variants) most = std::max(most, variant.seeds);
  for (int64_t i = 0; i < most; ++i) {
    const int64_t seed = study.first_seed + i;
    for (const auto& setting : study.settings) {
      if (i < seeds_of_setting(study, setting)) add(setting, "", seed, {});
    }
    if (i < study.noise_seeds) {
      add(study.noise_setting, kNoiseVariant, seed, {{"perturb", std::to_string(seed + 1)}});
    }
    for (const auto& variant : study.variants) {
      for (const auto& setting : variant.settings) {
        if (i < variant.seeds) add(setting, variant.name, seed, variant.options);
      }
    }
  }
  return plan;
}

const PlannedRun& find_run(const std::vector<PlannedRun>& plan, const std::string& name) {
  std::vector<std::string> names;
  for (const auto& run : plan) {
    if (run.name == name) return run;
    names.push_back(run.name);
  }
  const std::string near = train::nearest(name, names);
  TORCH_CHECK_VALUE(
      false, "the study has no run '", name, "'",
      near.empty() ? std::string() : c10::str("; did you mean ", near, "?"));
}

}  // namespace study
