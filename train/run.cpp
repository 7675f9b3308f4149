#include "train/run.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <regex>

#include "gpt/manifest.h"
#include "gpt/shards.h"
#include "train/errors.h"
#include "train/machine.h"
#include "train/process_group.h"
#include "train/recipe.h"

namespace train {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMicroBatchTokens = 4096;

// Version of config.toml. The files of format 1 have neither a first line that says so nor a checksum.
constexpr int kFormat = 4;

// Keys that did not exist in format 1. A key that is added to the config belongs here, with a new format. All other
// keys must be there.
struct LaterKey {
  const char* name;
  int format;
};
constexpr LaterKey kLaterKeys[] = {
    {"shuffle", 2},
    {"engine", 2},
    {"muon-engine", 2},
    {"diagnose-every", 2},
    {"diagnose-groups", 2},
    {"diagnose-exact", 2},
    {"perturb", 2},
    {"tail-steps", 2},
    {"restarts", 2},
    {"rank-tolerance", 2},
    {"custom-coefficients", 2},
    {"reduction", 3},
    {"qk-norm", 4},
    {"qkv-lr", 4},
    {"match-spectral", 4},
    {"row-balance", 4},
};

// What a run's config.toml says, before it is checked.
struct WrittenConfig {
  std::string path;
  Options options;
  int format = 1;
  uint32_t checksum = 0;

  bool has(std::string_view name) const {
    return std::any_of(
        options.begin(), options.end(), [&](const auto& option) { return option.first == name; });
  }
};

bool is_place(std::string_view key) { return key == "data" || key == "out"; }

// Checksum of what a config means, without the places of data and run. The order of keys does not matter.
uint32_t checksum_of(Options options) {
  std::sort(options.begin(), options.end());
  std::string text;
  for (const auto& [name, value] : options) {
    if (!is_place(name)) text.append(name).append("=").append(value).append("\n");
  }
  return crc32c(0, text.data(), text.size());
}

std::string text_of_config(const Config& config) {
  char first[128];
  std::snprintf(
      first, sizeof first,
      "# A run of group-muon, format %d, checksum %08x. Change options by flags of --resume.\n",
      kFormat, checksum_of(options_of(config)));
  return first + to_toml(config);
}

WrittenConfig read_config(const std::string& folder) {
  WrittenConfig written;
  written.path = folder + kConfigFile;
  written.options = read_options(written.path);
  const std::string text = read_text(written.path);
  static const std::regex first_line(
      "# A run of group-muon, format ([0-9]{1,6}), checksum ([0-9a-f]{8})");
  std::smatch found;
  if (std::regex_search(text, found, first_line, std::regex_constants::match_continuous)) {
    written.format = std::stoi(found[1]);
    written.checksum = static_cast<uint32_t>(std::stoul(found[2], nullptr, 16));
  }
  TORCH_CHECK_VALUE(
      written.format <= kFormat, "'", folder, "' was written by a newer version of group-muon");
  return written;
}

// The value of a key, or null.
const std::string* find(const Options& options, std::string_view name) {
  const auto found = std::find_if(
      options.begin(), options.end(), [&](const auto& option) { return option.first == name; });
  return found == options.end() ? nullptr : &found->second;
}

// The config in the newest checkpoint that can be read and has one. It is only used to explain errors.
Options config_in_checkpoints(const std::string& folder) {
  auto all = list_checkpoints(folder);
  for (auto path = all.rbegin(); path != all.rend(); ++path) {
    try {
      const auto state = read_state(*path);
      if (!state.config.empty()) return state.config;
    } catch (const std::exception&) {
      continue;
    }
  }
  return {};
}

// A file has every key of its format. One of an older format may lack those that came later.
void require_every_key(const std::string& folder, const WrittenConfig& written) {
  for (const auto& key : config_keys()) {
    const auto later = std::find_if(
        std::begin(kLaterKeys), std::end(kLaterKeys),
        [&](const LaterKey& entry) { return std::string_view(entry.name) == key.name; });
    const int since = later == std::end(kLaterKeys) ? 1 : later->format;
    if (since > written.format || written.has(key.name)) continue;
    const Options known = config_in_checkpoints(folder);
    const auto* value = find(known, key.name);
    TORCH_CHECK_VALUE(
        false, "'", written.path, "' has no ", key.name, " under [", key.section,
        "]. A run's config has every key; put it back",
        value == nullptr ? "" : c10::str(": the run's checkpoints say ", key.name, " = ", *value));
  }
}

// The values of a config.toml must give its checksum.
void require_checksum(const std::string& folder, const WrittenConfig& written) {
  if (written.format == 1 || checksum_of(written.options) == written.checksum) return;
  std::string changed;
  const Options known = config_in_checkpoints(folder);
  for (const auto& [name, value] : written.options) {
    const auto* before = find(known, name);
    if (before == nullptr || *before == value || is_place(name)) continue;
    changed += c10::str(
        changed.empty() ? ": " : ", ", name, " = ", value, ", but ", *before,
        " in its checkpoints");
  }
  TORCH_CHECK_VALUE(
      false, "'", written.path, "' was changed by hand or is damaged", changed,
      ". Put it back; options of a run change by flags of --resume");
}

// A run's config and its checkpoint must agree in everything that makes it this run.
void require_same_run(const std::string& folder, const Config& config, const TrainerState& state) {
  const auto written = read_config(folder);
  for (const auto& option : state.config) {
    const auto& name = option.first;
    const auto& value = option.second;
    const auto& keys = config_keys();
    const auto key =
        std::find_if(keys.begin(), keys.end(), [&](const Key& one) { return one.name == name; });
    if (key == keys.end() || key->on_change != OnChange::kRefused || is_place(name)) continue;
    TORCH_CHECK_VALUE(
        written.has(name) && get(config, *key) == value, "'", written.path, "' ",
        written.has(name) ? c10::str("says ", name, " = ", get(config, *key)) : "has no " + name,
        ", but the checkpoint of step ", state.step, " was made with ", name, " = ", value,
        ". Put it back");
  }
  TORCH_CHECK_VALUE(
      state.step <= config.steps, "the checkpoint is of step ", state.step, ", but the run in '",
      folder, "' has ", config.steps, " steps");
}

// Engines of runs from before there was a choice of engines: the model's was portable. The optimizer used the model's
// where it fits.
Config with_older_engines(Config config) {
  auto& muon = config.muon;
  if (muon.engine() == "auto" && muon.precision() != "auto") {
    const bool fits =
        group_muon::may_be_gram(group_muon::parse_method(muon.method())) &&
        group_muon::computes_in(
            group_muon::parse_engine(config.engine), group_muon::parse_precision(muon.precision()));
    muon.engine(fits ? config.engine : "portable");
  }
  return config;
}

// The files that a resumed run continues must be files that can be read.
void require_records(const std::string& folder) {
  for (const char* name : {kMetricsFile, kDiagnosticsFile, kMachineFile}) {
    const std::string path = folder + name;
    if (!fs::exists(path)) continue;
    TORCH_CHECK_VALUE(
        fs::is_regular_file(path), "'", path,
        "' is not a file and cannot be continued; move it away");
    crc32c_of_file(path);  // throws if it cannot be read
  }
}

// A checksum of the first 33 million tokens and of samples of the rest.
uint32_t sampled_crc(const gpt::TokenStream& stream, int64_t size, uint32_t crc) {
  constexpr int64_t kChunk = 65536, kFirst = int64_t{1} << 25, kSamples = 256;
  std::vector<int64_t> tokens(kChunk);
  const auto take = [&](int64_t at) {
    const int64_t count = std::min(kChunk, size - at);
    stream.read(at, count, tokens.data());
    crc = crc32c(crc, tokens.data(), static_cast<size_t>(count) * sizeof(int64_t));
  };
  const int64_t first = std::min(size, kFirst);
  for (int64_t at = 0; at < first; at += kChunk) take(at);
  const int64_t stride = std::max<int64_t>(kChunk, (size - first) / kSamples);
  for (int64_t at = first; at < size; at += stride) take(at);
  return crc;
}

// With an ordered reduction it should suit several numbers of processes: it divides a half, a quarter or an eighth of the
// batch, if that is a whole number.
int64_t default_micro_batch(const Config& config) {
  const bool ordered = config.reduction == "ordered";
  int64_t part = config.batch;
  for (int halvings = 0; ordered && halvings < 3 && part % 2 == 0; ++halvings) part /= 2;
  int64_t size = std::clamp<int64_t>(kMicroBatchTokens / config.context, 1, part);
  while (ordered && part % size != 0) --size;
  return size;
}

// compare_for_resume(). Its error also says what to do instead.
std::vector<std::string> notes_on_changes(const Config& was, const Config& is) {
  try {
    return compare_for_resume(was, is);
  } catch (const c10::Error& error) {
    TORCH_CHECK_VALUE(
        false, error.what_without_backtrace(),
        "; a resumed run keeps its options. Remove this one, or start a new run, ",
        "for example from this run's weights: --init RUN --out ANOTHER");
  }
}

// The run's config with the options of a resume, resolved for this machine.
Config config_to_resume(const Config& saved, const Options& options) {
  Config config = configure(options, saved);
  const auto given = [&](const char* key) { return find(options, key) != nullptr; };
  if (given("engine") && !given("muon-engine"))
    config.muon.engine("auto");  // it follows the model's
  const Config possible = without_missing_engines(saved);
  for (const char* name : {"engine", "muon-engine"}) {
    const Key& engine = find_key(name);
    if (get(config, engine) == get(saved, engine)) set(config, engine, get(possible, engine));
  }
  // Check precisions first. Otherwise the error would blame an engine that cannot compute in the new precision.
  Config probe = saved;
  for (const char* name : {"precision", "muon-precision", "validation-precision"}) {
    const Key& precision = find_key(name);
    if (get(config, precision) == "auto") set(config, precision, get(saved, precision));
    set(probe, precision, get(config, precision));
  }
  notes_on_changes(saved, probe);
  // More processes may share this machine than before.
  if (!given("threads") && started_by_torchrun()) {
    config.threads = std::min(config.threads, threads_per_process());
  }
  config = resolved(config);
  if (fs::weakly_canonical(config.out) == fs::weakly_canonical(saved.out)) config.out = saved.out;
  return config;
}

// "" if auto would choose the engines that the run has.
std::string note_on_engines(const Config& config) {
  Config best = config;
  best.engine = "auto";
  best.muon.engine("auto");
  best = with_engine(best);
  if (best.engine == config.engine && best.muon.engine() == config.muon.engine()) return "";
  return c10::str(
      "the run computes with engine ", config.engine, " (optimizer: ", config.muon.engine(),
      "); for this machine auto would choose ", best.engine, " (", best.muon.engine(),
      "). --engine auto switches to it");
}

void record_start(const Config& config, int processes) {
  const std::string path = config.out + kConfigFile, text = text_of_config(config);
  if (!fs::exists(path) || read_text(path) != text) replace_file(path, text);
  auto facts = machine_facts();
  facts["processes"] = processes;
  facts["time"] = std::chrono::duration_cast<std::chrono::seconds>(
                      std::chrono::system_clock::now().time_since_epoch())
                      .count();
  OutputFile(config.out + kMachineFile, /*append=*/true).write(facts.dump() + "\n");
}

}  // namespace

Place locate(const std::string& path) {
  fs::path place = normal_path(path);
  if (has_run(place.string())) return {place.string(), ""};
  // RUN/checkpoints/step-000125, possibly relative to a folder inside the run
  if (!place.empty() && !place.parent_path().has_parent_path()) place = fs::absolute(place);
  const fs::path run = place.parent_path().parent_path();
  const bool in_run =
      "/" + place.parent_path().filename().string() == kCheckpointsFolder && has_run(run.string());
  TORCH_CHECK_VALUE(
      in_run || fs::exists(place), "there is no folder '", path,
      "'; give the folder of a run or of one of its checkpoints");
  TORCH_CHECK_VALUE(in_run, "'", path, "' contains no run (there is no config.toml)");
  TORCH_CHECK_VALUE(
      fs::is_directory(place) && step_of(place.string()) >= 0, "there is no checkpoint '", path,
      "'");
  return {run.string(), place.string()};
}

bool has_run(const std::string& folder) { return fs::exists(folder + kConfigFile); }

Config resolved(Config config) {
  check(config);
  TORCH_CHECK_VALUE(
      !config.data.empty(), "no data given; set --data to a folder made by 'group-muon tokenize'");
  for (auto* path : {&config.data, &config.init}) {  // a resumed run may start elsewhere
    if (!path->empty()) *path = fs::absolute(*path).lexically_normal().string();
  }
  if (config.vocabulary == 0) config.vocabulary = gpt::vocabulary_of_data(config.data);
  if (config.micro_batch == 0) config.micro_batch = default_micro_batch(config);
  config = with_engine(std::move(config));
  if (config.threads == 0) config.threads = threads_per_process();
  return config;
}

Config config_of_run(const std::string& folder) {
  const auto written = read_config(folder);
  require_every_key(folder, written);
  require_checksum(folder, written);
  Options options = {{"engine", "portable"}};  // of format 1
  options.insert(options.end(), written.options.begin(), written.options.end());
  Config config = with_older_engines(configure(options));
  config.out = folder;  // it may have been moved
  return config;
}

Config filled_in(Config config, const Config& found) {
  if (config.vocabulary == 0) config.vocabulary = found.vocabulary;
  if (config.micro_batch == 0) config.micro_batch = found.micro_batch;
  if (config.precision == "auto") config.precision = found.precision;
  auto& muon = config.muon;
  if (muon.precision() == "auto") muon.precision(found.muon.precision());
  if (config.validation_precision == "auto") {
    config.validation_precision = found.validation_precision;
  }
  if (config.engine == "auto") config.engine = found.engine;
  if (muon.engine() == "auto") muon.engine(found.muon.engine());
  if (muon.method() == "auto") muon.method(found.muon.method());
  if (config.threads == 0) config.threads = found.threads;
  return config;
}

uint32_t fingerprint(
    const gpt::TokenStream& training, const gpt::TokenStream& validation,
    int64_t validation_tokens) {
  return sampled_crc(
      validation, validation_tokens, sampled_crc(training, training.size(), /*crc=*/0));
}

uint32_t checksum_of_data(const Config& config) {
  const int64_t vocabulary = resolved(config).vocabulary;
  const gpt::TokenStream training(config.data, "train", vocabulary);
  const gpt::TokenStream validation(config.data, "val", vocabulary);
  return fingerprint(training, validation, validation.size());
}

SavedRun read_run(const std::string& path, const ReadOptions& options) {
  const auto place = locate(path);
  SavedRun run;
  run.config = config_of_run(place.run);
  const auto all = list_checkpoints(place.run);
  TORCH_CHECK_VALUE(
      place.checkpoint.empty() || !options.best,
      "--best chooses among the checkpoints of a run; give the run, not a checkpoint");
  run.checkpoint = !place.checkpoint.empty() ? place.checkpoint
                   : all.empty()             ? ""
                   : options.best            ? best_checkpoint(all)
                                             : all.back();
  TORCH_CHECK_VALUE(
      !options.best || all.empty() || !run.checkpoint.empty(), "no checkpoint of '", path,
      "' has a validation loss; remove --best");
  if (run.checkpoint.empty()) return run;
  require_whole(run.checkpoint, all, options.weights_only, options.offer);
  run.state = read_state(run.checkpoint);
  require_same_run(place.run, run.config, run.state);
  return run;
}

SavedRun read_trained_run(const std::string& path, const ReadOptions& options) {
  auto run = read_run(path, options);
  TORCH_CHECK_VALUE(!run.checkpoint.empty(), "'", path, "' has no checkpoint yet");
  return run;
}

void refuse_existing(const std::string& folder) {
  TORCH_CHECK_VALUE(
      !has_run(folder), "'", folder, "' already contains a run; resume it with --resume ", folder,
      " or choose another --out");
  for (const char* name : {kCheckpointsFolder, kMetricsFile}) {
    TORCH_CHECK_VALUE(
        !fs::exists(folder + name), "'", folder, "' contains parts of a run (", name + 1,
        ", but no config.toml), which cannot be resumed; move them away or choose another --out");
  }
}

Run begin_run(const Config& config, std::shared_ptr<FolderLock> lock, int processes) {
  make_folder(config.out);
  if (!lock) lock = std::make_shared<FolderLock>(config.out);
  refuse_existing(config.out);  // another process may have started a run in the meantime
  const std::string vocabulary = std::string("/") + gpt::kVocabularyFile;
  if (fs::exists(config.data + vocabulary)) {
    replace_file(config.out + vocabulary, read_text(config.data + vocabulary));
  }
  record_start(config, processes);
  return {.config = config, .checkpoint = {}, .state = {}, .notes = {}, .lock = std::move(lock)};
}

Run open_run(const std::string& path, const Options& options, std::shared_ptr<FolderLock> lock) {
  Run run;
  run.lock = lock ? std::move(lock) : std::make_shared<FolderLock>(locate(path).run);
  const auto saved = read_run(path, {.offer = "resume from it with --resume "});
  require_records(saved.config.out);
  run.config = config_to_resume(saved.config, options);
  run.checkpoint = saved.checkpoint;
  run.state = saved.state;
  run.notes = notes_on_changes(saved.config, run.config);
  const std::string engines = find(options, "engine") == nullptr ? note_on_engines(run.config) : "";
  if (!engines.empty()) run.notes.push_back(engines);
  if (!saved.checkpoint.empty() && saved.state.config.empty()) {
    run.notes.emplace_back(
        "the run is from an older version, whose checkpoints do not keep the config: its "
        "config.toml is taken as it is");
  }
  run.notes.push_back(
      run.checkpoint.empty() ? "there is no checkpoint yet: the run starts from the beginning"
                             : "resuming from " + run.checkpoint);
  return run;
}

void take_over(const Run& run, int processes) {
  if (!run.checkpoint.empty()) set_aside_later(run.config.out, run.state.step);
  record_start(run.config, processes);
}

}  // namespace train
