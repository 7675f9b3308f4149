#include "train/train.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numeric>
#include <thread>

#include "gpt/shards.h"
#include "gpt/tokenizer.h"
#include "train/batch.h"
#include "train/candidates.h"
#include "train/checkpoint.h"
#include "train/errors.h"
#include "train/files.h"
#include "train/machine.h"
#include "train/metrics.h"
#include "train/recipe.h"

namespace train {
namespace {

namespace fs = std::filesystem;
using torch::Tensor;
using Clock = std::chrono::steady_clock;

constexpr int64_t kMicroBatchTokens = 4096;
constexpr int64_t kGpt2Vocabulary = 50257;
constexpr const char* kVocabularyFile = "/vocabulary.tiktoken";

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Thrown to abort a step or validation, which is then discarded. It is not an error, so `catch (std::exception)` should
// not see it.
struct Stop {};

// Weights of one kind. Their norms are reported together.
struct WeightKind {
  std::string name;
  std::vector<Tensor> weights;
};

std::vector<WeightKind> kinds_of(const gpt::Model& model) {
  std::vector<WeightKind> kinds = {
      {"embedding", {}}, {"qkv", {}}, {"attention_output", {}}, {"mlp", {}}};
  for (const auto& item : model.named_parameters()) {
    const auto& name = item.key();
    const auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
    const size_t kind = has("wte") ? 0 : has("attn.c_attn") ? 1 : has("attn.c_proj") ? 2 : 3;
    kinds[kind].weights.push_back(item.value());
  }
  return kinds;
}

double norm_of(const std::vector<Tensor>& tensors) {
  return at::stack(at::_foreach_norm(tensors)).norm().item<double>();
}

using Values = std::vector<std::pair<std::string, double>>;

// One list of tensors per kind of weight.
using ByKind = std::vector<std::vector<Tensor>>;

template <typename TensorOf>
ByKind by_kind(const std::vector<WeightKind>& kinds, TensorOf&& tensor_of) {
  ByKind all;
  for (const auto& kind : kinds) {
    auto& tensors = all.emplace_back();
    for (const auto& weight : kind.weights) tensors.push_back(tensor_of(weight));
  }
  return all;
}

// Adds "PREFIX/kind" for every kind and "PREFIX" for all weights to `values`. Returns the norm of all.
double add_norms(
    Values& values, const std::string& prefix, const std::vector<WeightKind>& kinds,
    const ByKind& tensors) {
  double squares = 0;
  for (size_t i = 0; i < kinds.size(); ++i) {
    const double norm = norm_of(tensors[i]);
    values.emplace_back(prefix + "/" + kinds[i].name, norm);
    squares += norm * norm;
  }
  values.emplace_back(prefix, std::sqrt(squares));
  return std::sqrt(squares);
}

// A checksum of the first 33 million tokens and of samples of the rest. Reading them also finds tokens outside the
// vocabulary.
uint32_t fingerprint(const gpt::TokenStream& stream, int64_t size, uint32_t crc) {
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

torch::Device device_of(const Config& config) {
  const torch::Device device(config.device);
  TORCH_CHECK_VALUE(
      !device.is_cuda() || at::hasCUDA(), "device = ", config.device,
      ": this program's torch has no CUDA support or finds no GPU");
  return device;
}

// State of one run.
class Trainer {
 public:
  Trainer(const Config& config, const Listener& listener);
  /// Loads a checkpoint; empty: starts from the beginning.
  void start(const std::string& checkpoint);
  Outcome run();

 private:
  double accumulate_gradients();
  void train_step(MetricsLog& metrics, DiagnosticsLog* diagnostics);
  double validate();
  std::string validation_engine() const;
  Batch batch_at(const gpt::TokenStream& stream, const std::vector<int64_t>& starts);
  void save();
  void report(bool validating, double part);
  void check_stop() const;
  bool is_due(int64_t interval) const {
    return state_.step == config_.steps || (interval > 0 && state_.step % interval == 0);
  }

  Config config_;
  const Listener& listener_;
  torch::Device device_;
  gpt::TokenStream training_, validation_;
  gpt::SequenceOrder order_;
  int64_t validation_windows_;
  gpt::Model model_;
  group_muon::GroupMuon optimizer_;
  std::vector<WeightKind> kinds_;
  double peak_;
  TrainerState state_;
  std::string last_checkpoint_;
  Progress progress_;
  std::vector<double> recent_seconds_;  // seconds of each of the last steps
  double validation_seconds_ = 0;       // seconds of the last validation
  double seconds_here_ = 0;             // seconds of this process's steps
  int64_t steps_here_ = 0;
};

Trainer::Trainer(const Config& config, const Listener& listener)
    : config_(config),
      listener_(listener),
      device_(device_of(config)),
      training_(config.data, "train", config.vocabulary),
      validation_(config.data, "val", config.vocabulary),
      order_(training_.size(), config.context, static_cast<uint64_t>(config.seed), config.shuffle),
      validation_windows_(gpt::SequenceOrder(validation_.size(), config.context, 0).windows()),
      model_(
          model_shape(config), matmul_precision(config.precision),
          static_cast<uint64_t>(config.seed)),
      // The model moves to the device before the optimizer gets its weights.
      optimizer_((model_.to(device_), group_muon::assemble(model_, optimizer_options(config)))),
      kinds_(kinds_of(model_)),
      peak_(gemm_peak(
          group_muon::parse_engine(config.engine), matmul_precision(config.precision), device_)) {
  model_.set_engine(group_muon::parse_engine(config.engine));
  TORCH_CHECK_VALUE(
      order_.windows() >= config.batch, "the training data in '", config.data, "' has ",
      training_.size(), " tokens, which is less than one batch of ", config.batch, " × ",
      config.context);
  const int64_t wanted = std::max<int64_t>(1, config.validation_tokens / config.context);
  if (wanted > validation_windows_ && listener_.note) {
    listener_.note(
        c10::str(
            "the validation data has ", validation_.size(),
            " tokens, fewer than validation-tokens = ", config.validation_tokens,
            "; using all of it"));
  }
  if (listener_.note) {
    for (const auto& note : unused_groupings(config)) listener_.note(note);
    const std::string note = software_bf16_note(config);
    if (!note.empty()) listener_.note(note);
  }
  validation_windows_ = std::min(wanted, validation_windows_);
  state_.training_tokens = training_.size();
  state_.data_crc = fingerprint(training_, training_.size(), 0);
  const int64_t validated = validation_windows_ * config.context + 1;
  state_.data_crc = fingerprint(validation_, validated, state_.data_crc);
}

Batch Trainer::batch_at(const gpt::TokenStream& stream, const std::vector<int64_t>& starts) {
  const auto timed = gpt::Timed(model_.profile(), gpt::Part::kData);
  return read_batch(stream, starts, config_.context, device_);
}

void Trainer::check_stop() const {
  if (listener_.stop_wanted && listener_.stop_wanted())
    throw Stop{};  // NOLINT(bugprone-std-exception-baseclass)
}

// Mean loss of a batch. Leaves its gradients in the weights. The result does not depend on the size of micro-batches,
// except for rounding.
double Trainer::accumulate_gradients() {
  double mean = 0;
  const int64_t first = state_.step * config_.batch;
  for (int64_t done = 0; done < config_.batch;) {
    check_stop();
    const int64_t count = std::min(config_.micro_batch, config_.batch - done);
    std::vector<int64_t> starts;
    for (int64_t i = 0; i < count; ++i) starts.push_back(order_.start_of(first + done + i));
    const double share = static_cast<double>(count) / static_cast<double>(config_.batch);
    const auto [tokens, targets] = batch_at(training_, starts);
    mean += model_.add_gradients(tokens, targets, share) * share;
    done += count;
    report(/*validating=*/false, static_cast<double>(done) / static_cast<double>(config_.batch));
  }
  return mean;
}

void Trainer::train_step(MetricsLog& metrics, DiagnosticsLog* diagnostics) {
  const auto start = Clock::now();
  const double factor = lr_factor(config_, state_.step);
  for (auto& group : optimizer_.param_groups()) {
    const bool is_muon = group_muon::muon_options(group) != nullptr;
    group.options().set_lr((is_muon ? config_.muon.lr() : config_.adamw_lr) * factor);
  }
  optimizer_.zero_grad();
  const double loss = accumulate_gradients();

  Values values = {{"loss", loss}, {"lr_factor", factor}};
  const ByKind gradients = by_kind(kinds_, [](const Tensor& weight) { return weight.grad(); });
  const double norm = add_norms(values, "gradient_norm", kinds_, gradients);
  TORCH_CHECK(
      std::isfinite(loss) && std::isfinite(norm), "step ", state_.step + 1, ": the loss is ", loss,
      " and the gradient norm is ", norm,
      "; the run cannot continue. Try a lower learning rate, --warmup or --clip");
  const torch::NoGradGuard no_grad;
  const double clip = config_.clip > 0 && norm > config_.clip ? config_.clip / norm : 1;
  if (clip != 1) {
    for (const auto& kind : gradients) at::_foreach_mul_(kind, clip);
  }
  if (diagnostics != nullptr && state_.step % config_.diagnose_every == 0) {
    const auto timed = gpt::Timed(model_.profile(), gpt::Part::kDiagnostics);
    diagnostics->write(state_.step, attention_weights(optimizer_, clip));
  }
  const ByKind updates = by_kind(kinds_, [](const Tensor& weight) { return weight.clone(); });
  const double before = model_.profile()[gpt::Part::kOptimizer];
  {
    const auto timed = gpt::Timed(model_.profile(), gpt::Part::kOptimizer);
    optimizer_.step();
  }
  const double optimizer_seconds = model_.profile()[gpt::Part::kOptimizer] - before;
  for (size_t i = 0; i < kinds_.size(); ++i) at::_foreach_sub_(updates[i], kinds_[i].weights);
  const double change = add_norms(values, "update_norm", kinds_, updates);
  TORCH_CHECK(
      std::isfinite(change), "step ", state_.step + 1, ": the update norm is ", change,
      "; the run cannot continue. Try a lower learning rate");

  const double seconds = seconds_since(start);
  state_.step += 1;
  state_.seconds += seconds;
  seconds_here_ += seconds;
  steps_here_ += 1;
  state_.validation_loss.reset();
  progress_.loss = loss;
  recent_seconds_.push_back(seconds);
  if (recent_seconds_.size() > 20) recent_seconds_.erase(recent_seconds_.begin());
  report(/*validating=*/false, 0);
  values.emplace_back("tokens", static_cast<double>(state_.step * config_.batch * config_.context));
  values.emplace_back("seconds", state_.seconds);
  values.emplace_back("tokens_per_second", progress_.tokens_per_second);
  values.emplace_back("optimizer_seconds", optimizer_seconds);  // this step only
  metrics.write(state_.step, values);
  if (listener_.step) listener_.step(progress_);
}

// Reports progress to the listener. `part` is the fraction done of the next step or of the validation.
void Trainer::report(bool validating, double part) {
  const auto steps = static_cast<double>(config_.steps);
  progress_.validating = validating;
  progress_.step = static_cast<double>(state_.step) + (validating ? 0 : part);
  progress_.fraction = validating ? part : progress_.step / steps;
  if (!recent_seconds_.empty()) {
    const double seconds = std::accumulate(recent_seconds_.begin(), recent_seconds_.end(), 0.0) /
                           static_cast<double>(recent_seconds_.size());
    progress_.tokens_per_second = static_cast<double>(config_.batch * config_.context) / seconds;
    progress_.peak_fraction =
        progress_.tokens_per_second * gpt::training_flops_per_token(model_.shape()) / peak_;
    const double steps_left = steps - progress_.step;
    const double validations_left =
        std::ceil(steps_left / static_cast<double>(config_.validation_interval));
    progress_.seconds_left = steps_left * seconds + validations_left * validation_seconds_;
  }
  if (listener_.progress) listener_.progress(progress_);
}

// The model's, if it computes in the precision of validations.
std::string Trainer::validation_engine() const {
  const auto engine = group_muon::parse_engine(config_.engine);
  const bool fits = group_muon::computes_in(engine, matmul_precision(config_.validation_precision));
  return std::string(group_muon::to_string(fits ? engine : group_muon::Engine::kPortable));
}

double Trainer::validate() {
  const gpt::Profile of_training = model_.profile();
  model_.set_precision(matmul_precision(config_.validation_precision));
  const auto start = Clock::now();
  double sum = 0;
  for (int64_t done = 0; done < validation_windows_;) {
    check_stop();
    const int64_t count = std::min(config_.micro_batch, validation_windows_ - done);
    std::vector<int64_t> starts;
    for (int64_t i = 0; i < count; ++i) starts.push_back((done + i) * config_.context);
    const auto [tokens, targets] = batch_at(validation_, starts);
    sum += model_.evaluate(tokens, targets) * static_cast<double>(count);
    done += count;
    report(
        /*validating=*/true, static_cast<double>(done) / static_cast<double>(validation_windows_));
  }
  model_.set_precision(matmul_precision(config_.precision));
  model_.profile() = of_training;
  validation_seconds_ = seconds_since(start);
  const double loss = sum / static_cast<double>(validation_windows_);
  TORCH_CHECK(
      std::isfinite(loss), "step ", state_.step, ": the validation loss is ", loss,
      "; the run cannot continue. Try a lower learning rate, --warmup or --clip");
  return loss;
}

void Trainer::save() {
  last_checkpoint_ = save_checkpoint(config_.out, model_, optimizer_, state_);
  prune_checkpoints(config_.out, config_.keep);
  if (listener_.checkpoint) listener_.checkpoint(last_checkpoint_);
}

void Trainer::start(const std::string& checkpoint) {
  if (checkpoint.empty()) {
    if (!config_.init.empty()) load_weights(config_.init, model_);
    if (config_.perturb > 0) perturb(model_.parameters(), static_cast<uint64_t>(config_.perturb));
    return;
  }
  const auto saved = load_checkpoint(checkpoint, model_, optimizer_);
  TORCH_CHECK_VALUE(
      saved.training_tokens == state_.training_tokens && saved.data_crc == state_.data_crc,
      "the data in '", config_.data, "' is not the data the run started with");
  set_aside_later(config_.out, saved.step);
  state_ = saved;
  last_checkpoint_ = checkpoint;
}

Outcome Trainer::run() {
  const bool fresh = last_checkpoint_.empty();
  MetricsLog metrics =
      fresh ? MetricsLog(config_.out)
            : MetricsLog(config_.out, state_.step, state_.validation_loss.has_value());
  std::optional<DiagnosticsLog> diagnostics;
  if (config_.diagnose_every > 0) {
    diagnostics.emplace(
        config_.out, state_.step,
        make_candidates(model_.shape(), config_.diagnose_groups, config_.share_qk),
        config_.diagnose_exact ? group_muon::Accuracy::kExact : group_muon::Accuracy::kEstimate);
  }
  // A checkpoint is rewritten if the validation loss at its step has become known since.
  auto saved = fresh ? std::nullopt : std::optional(state_);
  const auto save_here = [&] {
    if (saved && saved->step == state_.step && saved->validation_loss == state_.validation_loss) {
      return;
    }
    metrics.sync();
    if (diagnostics) diagnostics->sync();
    save();
    saved = state_;
  };
  Outcome outcome;
  outcome.folder = config_.out;
  try {
    for (;;) {
      if (is_due(config_.validation_interval) && !state_.validation_loss) {
        const double loss = validate();
        state_.validation_loss = loss;
        metrics.write(
            state_.step, {{"validation_loss", loss}},
            {{"engine", config_.engine},
             {"muon_engine", config_.muon.engine()},
             {"validation_engine", validation_engine()},
             {"precision", config_.precision},
             {"muon_precision", config_.muon.precision()},
             {"validation_precision", config_.validation_precision}});
        if (listener_.validation) listener_.validation(state_.step, loss);
      }
      if (state_.step > 0 && is_due(config_.checkpoint_interval)) save_here();
      if (state_.step == config_.steps) break;
      train_step(metrics, diagnostics ? &*diagnostics : nullptr);
    }
  } catch (const Stop&) {
    outcome.stopped = true;
    save_here();
  }
  outcome.step = state_.step;
  outcome.profile = model_.profile();
  outcome.profiled_steps = steps_here_;
  outcome.profiled_seconds = seconds_here_;
  outcome.checkpoint = last_checkpoint_;
  outcome.validation_loss = state_.validation_loss.value_or(NAN);
  return outcome;
}

// Runs the trainer. Adds the last checkpoint to error messages.
Outcome run_or_say_where(Trainer& trainer, const std::string& run) {
  const auto hint = [&] {
    const auto all = list_checkpoints(run);
    if (all.empty()) return std::string(". There is no checkpoint to resume from");
    const std::string whole = damage(all.back()).empty() ? "is intact" : "is damaged";
    return ". The last checkpoint " + whole + ": " + all.back();
  };
  try {
    return trainer.run();
  } catch (const std::exception& error) {
    throw std::runtime_error(message_of(error) + hint());
  }
}

// The checkpoint to resume from: the given one, or the newest; "" if there is none.
std::string checkpoint_to_resume(const Place& place) {
  const auto all = list_checkpoints(place.run);
  if (all.empty()) return "";
  const std::string chosen = place.checkpoint.empty() ? all.back() : place.checkpoint;
  require_whole(chosen, all, /*weights_only=*/false, "resume from it with --resume ");
  return chosen;
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

void refuse_existing(const Config& config) {
  for (const char* name : {"/config.toml", "/checkpoints", "/metrics.jsonl"}) {
    TORCH_CHECK_VALUE(
        !fs::exists(config.out + name), "'", config.out,
        "' already contains a run; resume it with ", "--resume ", config.out,
        " or choose another --out");
  }
}

void record_start(const Config& config) {
  replace_file(config.out + "/config.toml", to_toml(config));
  auto facts = machine_facts();
  facts["time"] = std::chrono::duration_cast<std::chrono::seconds>(
                      std::chrono::system_clock::now().time_since_epoch())
                      .count();
  OutputFile(config.out + "/machine.jsonl", /*append=*/true).write(facts.dump() + "\n");
}

}  // namespace

Config resolved(Config config) {
  check(config);
  TORCH_CHECK_VALUE(
      !config.data.empty(), "no data given; set --data to a folder made by 'group-muon tokenize'");
  for (auto* path : {&config.data, &config.init}) {  // a resumed run may start elsewhere
    if (!path->empty()) *path = fs::absolute(*path).lexically_normal().string();
  }
  if (config.vocabulary == 0) {
    const std::string file = config.data + kVocabularyFile;
    config.vocabulary =
        fs::exists(file) ? gpt::Vocabulary::from_tiktoken(file).size() : kGpt2Vocabulary;
  }
  if (config.micro_batch == 0) {
    config.micro_batch = std::clamp<int64_t>(kMicroBatchTokens / config.context, 1, config.batch);
  }
  config = with_engine(std::move(config));
  if (config.threads == 0) config.threads = std::max(1U, std::thread::hardware_concurrency());
  return config;
}

Outcome train(const Config& given, const Listener& listener, std::shared_ptr<FolderLock> lock) {
  Config config = resolved(given);
  config.out = normal_path(config.out);
  TORCH_CHECK_VALUE(
      fs::absolute(config.out) != config.data, "out and data should be different folders");
  refuse_existing(config);
  to_toml(config);  // throws if the config cannot be written
  at::set_num_threads(static_cast<int>(config.threads));
  Trainer trainer(config, listener);
  trainer.start("");
  make_folder(config.out);
  if (!lock) lock = std::make_shared<FolderLock>(config.out);
  refuse_existing(config);  // another process may have started a run in the meantime
  if (fs::exists(config.data + kVocabularyFile)) {
    replace_file(config.out + kVocabularyFile, read_text(config.data + kVocabularyFile));
  }
  record_start(config);
  if (listener.begin) listener.begin(config.out);
  return run_or_say_where(trainer, config.out);
}

Config config_of_run(const std::string& folder) {
  // The default for runs from before there was a choice of engines.
  Options written = {{"engine", "portable"}};
  const Options saved = read_options(folder + "/config.toml");
  written.insert(written.end(), saved.begin(), saved.end());
  Config config = configure(written);
  // Runs from before the optimizer had an engine of its own used the model's where it fits.
  if (config.muon.engine() == "auto" && config.muon.precision() != "auto") {
    const auto method = group_muon::parse_method(config.muon.method());
    const bool gram =
        method != group_muon::Method::kNewtonSchulz && method != group_muon::Method::kExact;
    const bool fits = gram && group_muon::computes_in(
                                  group_muon::parse_engine(config.engine),
                                  group_muon::parse_precision(config.muon.precision()));
    config.muon.engine(fits ? config.engine : "portable");
  }
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

uint32_t checksum_of_data(const Config& config) {
  const int64_t vocabulary = resolved(config).vocabulary;
  const gpt::TokenStream training(config.data, "train", vocabulary);
  const gpt::TokenStream validation(config.data, "val", vocabulary);
  return fingerprint(validation, validation.size(), fingerprint(training, training.size(), 0));
}

Run open_run(const std::string& path, const Options& options, std::shared_ptr<FolderLock> lock) {
  const auto place = locate(path);
  Run run;
  run.lock = lock ? std::move(lock) : std::make_shared<FolderLock>(place.run);
  const Config saved = config_of_run(place.run);
  Config config = configure(options, saved);
  const auto given = [&](const char* key) {
    return std::any_of(
        options.begin(), options.end(), [&](const auto& option) { return option.first == key; });
  };
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
  run.config = resolved(config);
  if (fs::weakly_canonical(run.config.out) == fs::weakly_canonical(saved.out)) {
    run.config.out = saved.out;
  }
  run.notes = notes_on_changes(saved, run.config);
  Config best = run.config;
  best.engine = "auto";
  best.muon.engine("auto");
  best = with_engine(best);
  if (!given("engine") &&
      (best.engine != run.config.engine || best.muon.engine() != run.config.muon.engine())) {
    run.notes.push_back(
        c10::str(
            "the run computes with engine ", run.config.engine,
            " (optimizer: ", run.config.muon.engine(), "); for this machine auto would choose ",
            best.engine, " (", best.muon.engine(), "). --engine auto changes to it"));
  }
  run.checkpoint = checkpoint_to_resume(place);
  run.notes.push_back(
      run.checkpoint.empty() ? "there is no checkpoint yet: the run starts from the beginning"
                             : "resuming from " + run.checkpoint);
  return run;
}

Outcome resume(const Run& run, const Listener& listener) {
  if (listener.begin) listener.begin(run.config.out);
  if (!run.checkpoint.empty()) {
    const auto state = read_state(run.checkpoint);
    if (state.step == run.config.steps && state.validation_loss) {
      if (listener.note)
        listener.note("the run is finished: all " + std::to_string(state.step) + " steps are done");
      return {
          .folder = run.config.out,
          .step = state.step,
          .validation_loss = *state.validation_loss,
          .checkpoint = run.checkpoint};
    }
  }
  if (listener.note) {
    for (const auto& note : run.notes) listener.note(note);
  }
  at::set_num_threads(static_cast<int>(run.config.threads));
  Trainer trainer(run.config, listener);
  trainer.start(run.checkpoint);
  record_start(run.config);
  return run_or_say_where(trainer, run.config.out);
}

}  // namespace train
