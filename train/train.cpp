#include "train/train.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

#include "gpt/manifest.h"
#include "gpt/shards.h"
#include "train/batch.h"
#include "train/candidates.h"
#include "train/checkpoint.h"
#include "train/errors.h"
#include "train/machine.h"
#include "train/memory.h"
#include "train/metrics.h"
#include "train/norms.h"
#include "train/recipe.h"

namespace train {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr int64_t kUpdateNormInterval = 10;  // steps

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Thrown to abort a step or validation, which is then discarded. It is not an error, so `catch (std::exception)` should
// not see it.
struct Stop {};

torch::Device device_of(const Config& config) {
  const torch::Device device(config.device);
  TORCH_CHECK_VALUE(
      !device.is_cuda() || at::hasCUDA(), "device = ", config.device,
      ": this program's torch has no CUDA support or finds no GPU");
  return device;
}

// The model's engine, if it computes in the precision of validations.
std::string validation_engine(const Config& config) {
  const auto engine = group_muon::parse_engine(config.engine);
  const bool fits = group_muon::computes_in(engine, matmul_precision(config.validation_precision));
  return std::string(group_muon::to_string(fits ? engine : group_muon::Engine::kPortable));
}

// What a run writes while it trains, besides checkpoints.
struct Records {
  /// Continues those of the saved state, if there is one.
  Records(
      const Config& config, const gpt::ModelShape& shape, const std::optional<TrainerState>& saved)
      : metrics(
            saved ? MetricsLog(config.out, saved->step, saved->validation_loss.has_value())
                  : MetricsLog(config.out)) {
    if (config.diagnose_every == 0) return;
    diagnostics.emplace(
        config.out, saved ? saved->step : 0,
        make_candidates(shape, config.diagnose_groups, config.share_qk, config.qkv_lr),
        config.diagnose_exact ? group_muon::Accuracy::kExact : group_muon::Accuracy::kEstimate);
  }

  MetricsLog metrics;
  std::optional<DiagnosticsLog> diagnostics;

  std::vector<std::string> notes() const {
    auto all = metrics.notes();
    if (diagnostics) {
      all.insert(all.end(), diagnostics->notes().begin(), diagnostics->notes().end());
    }
    return all;
  }
  void sync() {
    metrics.sync();
    if (diagnostics) diagnostics->sync();
  }
};

// Speed of the last steps, and what follows from it.
class Pace {
 public:
  Pace(const Config& config, double flops_per_token, double peak)
      : config_(config), flops_per_token_(flops_per_token), peak_(peak) {}

  void add_step(double seconds) {
    recent_.push_back(seconds);
    if (recent_.size() > 20) recent_.erase(recent_.begin());
  }
  void set_validation(double seconds) { validation_seconds_ = seconds; }

  // Fills in speed and time left.
  void estimate(Progress& progress) const {
    if (recent_.empty()) return;
    const double seconds =
        std::accumulate(recent_.begin(), recent_.end(), 0.0) / static_cast<double>(recent_.size());
    progress.tokens_per_second = static_cast<double>(config_.batch * config_.context) / seconds;
    progress.peak_fraction = progress.tokens_per_second * flops_per_token_ / peak_;
    const double steps_left = static_cast<double>(config_.steps) - progress.step;
    const double validations_left =
        std::ceil(steps_left / static_cast<double>(config_.validation_interval));
    progress.seconds_left = steps_left * seconds + validations_left * validation_seconds_;
  }

 private:
  const Config& config_;
  double flops_per_token_, peak_;
  std::vector<double> recent_;  // seconds of each of the last steps
  double validation_seconds_ = 0;
};

// The loop, with everything it needs in memory.
class Trainer {
 public:
  Trainer(const Config& config, const Listener& listener, const Processes& processes);
  /// Weights for step 0.
  void initialize();
  /// Everything from the run's checkpoint, whose data must be this data.
  void load(const Run& run);
  Outcome run(std::shared_ptr<FolderLock> lock);

 private:
  void step(Records* records);
  std::vector<double> add_own_gradients();
  double agreed_sum(const std::function<std::vector<double>()>& parts);
  double measure(Values& values, const std::vector<group_muon::OwnGradient>& gradients);
  double validate();
  void set_learning_rates(double factor);
  double clip_gradients(const std::vector<group_muon::OwnGradient>& gradients, double norm);
  double update(Values& values);
  void finish_step(double loss, double seconds);
  void save(Records* records);
  void report(bool validating, double part);
  BeforeMicroBatch before(bool validating);
  void check_processes() const;
  int64_t together() const;
  void share();
  void write_validation(MetricsLog& metrics, double loss) const;
  bool is_due(int64_t interval) const {
    return state_.step == config_.steps || (interval > 0 && state_.step % interval == 0);
  }
  void note(const std::string& text) const {
    if (!text.empty() && listener_.note) listener_.note(text);
  }
  Outcome outcome(bool stopped);

  Config config_;
  const Listener& listener_;
  const Processes& processes_;
  torch::Device device_;
  gpt::TokenStream training_, validation_;
  gpt::SequenceOrder order_;
  int64_t validation_windows_;
  gpt::Model model_;
  group_muon::GroupMuon optimizer_;
  std::vector<WeightKind> kinds_;
  Pace pace_;
  std::shared_ptr<FolderLock> lock_;
  TrainerState state_;
  std::optional<TrainerState> saved_;  // state of the last checkpoint
  std::string last_checkpoint_;
  Progress progress_;
  double seconds_here_ = 0;  // seconds of this process's steps
  int64_t steps_here_ = 0;
};

Trainer::Trainer(const Config& config, const Listener& listener, const Processes& processes)
    : config_(config),
      listener_(listener),
      processes_(processes),
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
      pace_(
          config_, gpt::training_flops_per_token(model_.shape()),
          processes.count * gemm_peak(
                                group_muon::parse_engine(config.engine),
                                matmul_precision(config.precision), device_)) {
  check_processes();
  model_.set_engine(group_muon::parse_engine(config.engine));
  TORCH_CHECK_VALUE(
      order_.windows() >= config.batch, "the training data in '", config.data, "' has ",
      training_.size(), " tokens, which is less than one batch of ", config.batch, " × ",
      config.context);
  const int64_t wanted = std::max<int64_t>(1, config.validation_tokens / config.context);
  if (wanted > validation_windows_) {
    note(
        c10::str(
            "the validation data has ", validation_.size(),
            " tokens, fewer than validation-tokens = ", config.validation_tokens,
            "; using all of it"));
  }
  if (!training_.has_manifest()) {
    note(
        "'" + config.data + "' has no " + gpt::kManifestFile +
        ", so damaged or mixed shards cannot be recognized; 'group-muon tokenize' writes one");
  }
  for (const auto& text : unused_groupings(config)) note(text);
  note(software_bf16_note(config));
  validation_windows_ = std::min(wanted, validation_windows_);
  state_.config = options_of(config);
  state_.training_tokens = training_.size();
  state_.data_crc = fingerprint(training_, validation_, validation_windows_ * config.context + 1);
  const std::vector<double> own = {
      static_cast<double>(state_.training_tokens), static_cast<double>(state_.data_crc)};
  const auto data = gather(processes_, own);
  for (size_t rank = 1; rank < data.size(); ++rank) {
    TORCH_CHECK_VALUE(
        data[rank] == data[0], "process ", rank, " of ", data.size(), " has other data in '",
        config.data, "' than process 0; every process should read the same data");
  }
}

// What processes that train together cannot do.
void Trainer::check_processes() const {
  const int count = processes_.count;
  if (config_.reduction == "ordered") {
    TORCH_CHECK_VALUE(
        config_.batch % config_.micro_batch == 0, "reduction = ordered needs a batch of whole ",
        "micro-batches, not batch = ", config_.batch, " and micro-batch = ", config_.micro_batch);
    const int64_t parts = config_.batch / config_.micro_batch;
    TORCH_CHECK_VALUE(
        (count & (count - 1)) == 0 && parts % count == 0,
        "reduction = ordered halves the batch again and again, so the number of processes should "
        "be "
        "a power of two that divides the number of micro-batches, which is ",
        config_.batch, " / ", config_.micro_batch, " = ", parts, "; there are ", count,
        " processes. Choose another micro-batch, or reduction = fast");
  }
  if (processes_.alone()) return;
  TORCH_CHECK_VALUE(
      device_.is_cpu(), "several processes train on CPUs only; with device = ", config_.device,
      ", start one process");
  TORCH_CHECK_VALUE(
      config_.diagnose_every == 0,
      "diagnose-every needs the whole momentum in one process; start one process, or measure a "
      "checkpoint with 'group-muon analyze'");
}

void Trainer::initialize() {
  if (processes_.writes()) {
    if (!config_.init.empty()) load_initial_weights(config_.init, model_);
    if (config_.perturb > 0) perturb(model_.parameters(), static_cast<uint64_t>(config_.perturb));
  }
  share();
}

// Gives all processes the first one's weights and states, and each its share of the optimizer's steps.
void Trainer::share() {
  if (processes_.alone()) return;
  for (const auto& weight : model_.parameters()) broadcast(processes_, weight);
  if (saved_) {
    for (const auto& tensor : tensors_of_state(model_, optimizer_)) broadcast(processes_, tensor);
    set_steps(optimizer_, state_.step);
  }
  optimizer_.share(processes_.group, group_muon::Gradients::kParts);
}

void Trainer::load(const Run& run) {
  const auto saved =
      processes_.writes() ? load_checkpoint(run.checkpoint, model_, optimizer_) : run.state;
  TORCH_CHECK_VALUE(
      saved.training_tokens == state_.training_tokens && saved.data_crc == state_.data_crc,
      "the data in '", config_.data, "' is not the data the run started with");
  saved_ = saved;
  state_ = saved;
  state_.config = options_of(config_);  // some options may have changed
  last_checkpoint_ = run.checkpoint;
  share();
}

void Trainer::step(Records* records) {
  const auto start = Clock::now();
  const double factor = lr_factor(config_, state_.step);
  set_learning_rates(factor);
  optimizer_.zero_grad();
  const double loss = agreed_sum([&] { return add_own_gradients(); });

  Values values = {{"loss", loss}, {"lr_factor", factor}};
  const torch::NoGradGuard no_grad;
  const auto gradients = optimizer_.own_gradients();
  const double norm = measure(values, gradients);
  TORCH_CHECK(
      std::isfinite(loss) && std::isfinite(norm), "step ", state_.step + 1, ": the loss is ", loss,
      " and the gradient norm is ", norm,
      "; the run cannot continue. Try a lower learning rate, --warmup or --clip");
  const double clip = clip_gradients(gradients, norm);
  if (records != nullptr && records->diagnostics && state_.step % config_.diagnose_every == 0) {
    const auto timed = gpt::Timed(model_.profile(), gpt::Part::kDiagnostics);
    records->diagnostics->write(state_.step, attention_weights(optimizer_, clip));
  }
  const double optimizer_seconds = update(values);
  finish_step(loss, seconds_since(start));
  if (records != nullptr) {
    values.emplace_back(
        "tokens", static_cast<double>(state_.step * config_.batch * config_.context));
    values.emplace_back("seconds", state_.seconds);
    values.emplace_back("tokens_per_second", progress_.tokens_per_second);
    values.emplace_back("optimizer_seconds", optimizer_seconds);  // this step only
    records->metrics.write(state_.step, values);
  }
  if (listener_.step) listener_.step(progress_);
}

// How many micro-batches an ordered reduction adds one after the other: the largest odd factor of their number.
int64_t Trainer::together() const {
  int64_t parts = config_.batch / config_.micro_batch;
  while (parts % 2 == 0) parts /= 2;
  return parts;
}

// This process's part of the gradients, and what its micro-batches contribute to the loss.
std::vector<double> Trainer::add_own_gradients() {
  Batch batch{&training_, {}, config_.context, config_.micro_batch, device_, config_.batch};
  const auto [first, last] = own_range(processes_, config_.batch);
  for (int64_t i = first; i < last; ++i) {
    batch.starts.push_back(order_.start_of(state_.step * config_.batch + i));
  }
  return config_.reduction == "ordered"
             ? add_gradients_in_tree(model_, batch, together(), before(/*validating=*/false))
             : add_gradients(model_, batch, before(/*validating=*/false));
}

// Collective. The sum of what all processes contribute, in their order. Gives up if one of them wants to stop.
double Trainer::agreed_sum(const std::function<std::vector<double>()>& parts) {
  std::vector<double> own = {0};  // 1: stop
  try {
    const auto contributed = parts();
    own.insert(own.end(), contributed.begin(), contributed.end());
  } catch (const Stop&) {
    own = {1};
    ask_to_stop(processes_);
  }
  double sum = 0;
  bool stop = false;
  for (const auto& some : gather(processes_, own)) {
    stop |= some[0] != 0;
    for (size_t i = 1; i < some.size(); ++i) sum += some[i];
  }
  if (stop) throw Stop{};  // NOLINT(bugprone-std-exception-baseclass)
  return sum;
}

// Collective. Norms of the whole gradient. Returns that of all weights.
double Trainer::measure(Values& values, const std::vector<group_muon::OwnGradient>& gradients) {
  std::vector<int64_t> digits;
  auto sums = squares_of(kinds_, gradients);
  for (const auto& kind : sums) {
    digits.insert(digits.end(), kind.digits().begin(), kind.digits().end());
  }
  digits = sum(processes_, digits);
  const auto count = static_cast<int64_t>(digits.size() / sums.size());
  std::vector<double> squares;
  for (auto first = digits.begin(); first != digits.end(); first += count) {
    sums[squares.size()].set_digits({first, first + count});
    squares.push_back(sums[squares.size()].value());
  }
  return add_norms(values, "gradient_norm", kinds_, squares);
}

void Trainer::set_learning_rates(double factor) {
  for (auto& group : optimizer_.param_groups()) {
    const bool is_muon = group_muon::muon_options(group) != nullptr;
    group.options().set_lr((is_muon ? config_.muon.lr() : config_.adamw_lr) * factor);
  }
}

// Scales the gradients to the norm `clip`, if they are larger. Returns the factor.
double Trainer::clip_gradients(const std::vector<group_muon::OwnGradient>& gradients, double norm) {
  if (config_.clip == 0 || norm <= config_.clip) return 1;
  const double factor = config_.clip / norm;
  for (const auto& gradient : gradients) gradient.grad.mul_(factor);
  return factor;
}

// Changes the weights. Returns the optimizer's seconds. The norm of the change needs a copy of all weights, so it is
// measured every so often. Changes that are not finite show in the next loss, and save() looks for them.
double Trainer::update(Values& values) {
  const int64_t number = state_.step + 1;
  const bool measured = number == 1 || number == config_.steps || number % kUpdateNormInterval == 0;
  ByKind changes;
  if (measured) changes = copies_of(kinds_);
  const double before = model_.profile()[gpt::Part::kOptimizer];
  {
    const auto timed = gpt::Timed(model_.profile(), gpt::Part::kOptimizer);
    optimizer_.step();
  }
  const double seconds = model_.profile()[gpt::Part::kOptimizer] - before;
  if (!measured) return seconds;
  for (size_t i = 0; i < kinds_.size(); ++i) at::_foreach_sub_(changes[i], kinds_[i].weights);
  const double change = add_norms(values, "update_norm", kinds_, squares_of(changes));
  TORCH_CHECK(
      std::isfinite(change), "step ", number, ": the update norm is ", change,
      "; the run cannot continue. Try a lower learning rate");
  return seconds;
}

void Trainer::finish_step(double loss, double seconds) {
  state_.step += 1;
  state_.seconds += seconds;
  state_.validation_loss.reset();
  seconds_here_ += seconds;
  steps_here_ += 1;
  progress_.loss = loss;
  pace_.add_step(seconds);
  report(/*validating=*/false, 0);
}

double Trainer::validate() {
  const gpt::Profile of_training = model_.profile();
  model_.set_precision(matmul_precision(config_.validation_precision));
  const auto start = Clock::now();
  const int64_t size = config_.micro_batch;
  Batch batch{&validation_, {}, config_.context, size, device_};
  const auto [first, last] = own_range(processes_, (validation_windows_ + size - 1) / size);
  for (int64_t i = first * size; i < std::min(last * size, validation_windows_); ++i) {
    batch.starts.push_back(i * config_.context);
  }
  const double loss =
      agreed_sum([&] { return losses(model_, batch, before(/*validating=*/true)); }) /
      static_cast<double>(validation_windows_);
  model_.set_precision(matmul_precision(config_.precision));
  model_.profile() = of_training;
  pace_.set_validation(seconds_since(start));
  TORCH_CHECK(
      std::isfinite(loss), "step ", state_.step, ": the validation loss is ", loss,
      "; the run cannot continue. Try a lower learning rate, --warmup or --clip");
  return loss;
}

// What happens between micro-batches: a wish to stop and the loss of the folder are noticed, progress is told.
BeforeMicroBatch Trainer::before(bool validating) {
  return [this, validating](double done) {
    if ((listener_.stop_wanted && listener_.stop_wanted()) || stop_asked(processes_)) {
      throw Stop{};  // NOLINT(bugprone-std-exception-baseclass)
    }
    if (lock_) lock_->require_folder();
    report(validating, done);
  };
}

// Reports progress to the listener. `part` is the fraction done of the next step or of the validation.
void Trainer::report(bool validating, double part) {
  progress_.validating = validating;
  progress_.step = static_cast<double>(state_.step) + (validating ? 0 : part);
  progress_.fraction = validating ? part : progress_.step / static_cast<double>(config_.steps);
  pace_.estimate(progress_);
  if (listener_.progress) listener_.progress(progress_);
}

// Saves a checkpoint, if the weights are finite, unless the last one has this state. It is rewritten if the validation loss at its step has become
// known since.
void Trainer::save(Records* records) {
  if (saved_ && saved_->step == state_.step && saved_->validation_loss == state_.validation_loss) {
    return;
  }
  if (lock_) lock_->require_folder();
  const torch::NoGradGuard no_grad;
  const double norm = norm_of(model_.parameters());
  TORCH_CHECK(
      std::isfinite(norm), "step ", state_.step, ": the norm of the weights is ", norm,
      "; the run cannot continue. Try a lower learning rate");
  group_muon::ParamStates gathered;
  if (!processes_.alone()) gathered = optimizer_.gathered_states(/*root=*/0);
  if (records != nullptr) {
    records->sync();
    last_checkpoint_ = save_checkpoint(
        config_.out, model_, optimizer_, state_, processes_.alone() ? nullptr : &gathered);
    prune_checkpoints(config_.out, config_.keep);
    if (listener_.checkpoint) listener_.checkpoint(last_checkpoint_);
  }
  saved_ = state_;
  gather(processes_, std::vector<double>{});  // so that all end if the first could not write
}

Outcome Trainer::run(std::shared_ptr<FolderLock> lock) {
  lock_ = std::move(lock);
  std::optional<Records> of_first;
  if (processes_.writes()) of_first.emplace(config_, model_.shape(), saved_);
  Records* records = of_first ? &*of_first : nullptr;
  if (records != nullptr) {
    for (const auto& text : records->notes()) note(text);
  }
  try {
    for (;;) {
      if (is_due(config_.validation_interval) && !state_.validation_loss) {
        const double loss = validate();
        state_.validation_loss = loss;
        if (records != nullptr) write_validation(records->metrics, loss);
        if (listener_.validation) listener_.validation(state_.step, loss);
      }
      if (state_.step > 0 && is_due(config_.checkpoint_interval)) save(records);
      if (state_.step == config_.steps) return outcome(/*stopped=*/false);
      step(records);
    }
  } catch (const Stop&) {
    save(records);
    return outcome(/*stopped=*/true);
  }
}

void Trainer::write_validation(MetricsLog& metrics, double loss) const {
  metrics.write(
      state_.step, {{"validation_loss", loss}},
      {{"engine", config_.engine},
       {"muon_engine", config_.muon.engine()},
       {"validation_engine", validation_engine(config_)},
       {"precision", config_.precision},
       {"muon_precision", config_.muon.precision()},
       {"validation_precision", config_.validation_precision}});
}

Outcome Trainer::outcome(bool stopped) {
  return {
      .folder = config_.out,
      .step = state_.step,
      .stopped = stopped,
      .validation_loss = state_.validation_loss.value_or(NAN),
      .checkpoint = last_checkpoint_,
      .profile = model_.profile(),
      .profiled_steps = steps_here_,
      .profiled_seconds = seconds_here_};
}

// Runs the trainer. Adds the last checkpoint to error messages.
Outcome run_or_say_where(Trainer& trainer, const Run& run) {
  const auto hint = [&] {
    const auto all = list_checkpoints(run.config.out);
    if (all.empty()) return std::string(". There is no checkpoint to resume from");
    const std::string whole = damage(all.back()).empty() ? "is intact" : "is damaged";
    return ". The last checkpoint " + whole + ": " + all.back();
  };
  try {
    return trainer.run(run.lock);
  } catch (const c10::DistBackendError& error) {
    throw ProcessLost(message_of(error), run.lock == nullptr ? "" : hint());
  } catch (const FolderGone& error) {
    throw std::runtime_error(
        std::string(error.what()) +
        ". The steps since its last checkpoint are lost; a folder that was moved can be resumed");
  } catch (const std::exception& error) {
    throw std::runtime_error(message_of(error) + (run.lock == nullptr ? "" : hint()));
  }
}

using Json = nlohmann::ordered_json;

// What another process needs of a run.
std::string text_of(const Run& run) {
  Json json = {
      {"checkpoint", run.checkpoint},
      {"step", run.state.step},
      {"seconds", run.state.seconds},
      {"validation_loss", nullptr},
      {"training_tokens", run.state.training_tokens},
      {"data_crc", run.state.data_crc},
      {"options", Json::array()}};
  if (run.state.validation_loss) json["validation_loss"] = *run.state.validation_loss;
  for (const auto& [key, value] : options_of(run.config)) json["options"].push_back({key, value});
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Run run_of(const std::string& text) {
  const auto json = Json::parse(text);
  if (json.contains("error")) throw std::runtime_error(json["error"].get<std::string>());
  Run run;
  Options options;
  for (const auto& option : json["options"]) options.emplace_back(option[0], option[1]);
  run.config = with_engine(without_missing_engines(configure(options)));
  run.checkpoint = json["checkpoint"];
  run.state.step = json["step"];
  run.state.seconds = json["seconds"];
  if (!json["validation_loss"].is_null()) run.state.validation_loss = json["validation_loss"];
  run.state.training_tokens = json["training_tokens"];
  run.state.data_crc = json["data_crc"];
  return run;
}

// All processes must be of one build: others may add up in another order.
void require_one_build(const Processes& processes) {
  const auto facts = machine_facts();
  char checksum[16];
  std::snprintf(checksum, sizeof checksum, "%08x", crc32c_of_file("/proc/self/exe"));
  const auto builds = gather(
      processes, c10::str(
                     "commit ", facts["commit"].get<std::string>(), " with torch ",
                     facts["torch"].get<std::string>(), " and checksum ", checksum));
  for (size_t rank = 1; rank < builds.size(); ++rank) {
    TORCH_CHECK_VALUE(
        builds[rank] == builds[0], "process ", rank, " of ", builds.size(),
        " runs another build of group-muon (", builds[rank], ") than process 0 (", builds[0],
        "); install the same one everywhere");
  }
}

}  // namespace

Run prepared_by_first(const Processes& processes, const std::function<Run()>& prepare) {
  if (processes.alone()) return prepare();
  require_one_build(processes);
  Run run;
  std::string text;
  std::exception_ptr failure;
  if (processes.writes()) {
    try {
      run = prepare();
      text = text_of(run);
    } catch (const std::exception& error) {
      failure = std::current_exception();
      text =
          Json({{"error", message_of(error)}}).dump(-1, ' ', false, Json::error_handler_t::replace);
    }
  }
  text = gather(processes, text)[0];
  if (failure) std::rethrow_exception(failure);
  return processes.writes() ? run : run_of(text);
}

Outcome train(
    const Config& given, const Listener& listener, std::shared_ptr<FolderLock> lock,
    const Processes& processes) {
  const Config config = prepared_by_first(processes, [&] {
                          Run run;
                          run.config = resolved(given);
                          run.config.out = normal_path(run.config.out);
                          TORCH_CHECK_VALUE(
                              fs::absolute(run.config.out) != run.config.data,
                              "out and data should be different folders");
                          refuse_existing(run.config.out);
                          to_toml(run.config);  // throws if the config cannot be written
                          return run;
                        }).config;
  require_training_memory(config);
  at::set_num_threads(static_cast<int>(config.threads));
  Trainer trainer(config, listener, processes);
  trainer.initialize();
  Run run;
  run.config = config;
  if (processes.writes()) {
    run = begin_run(config, std::move(lock), processes.count);
    say_run_has_begun(processes);
  }
  if (listener.begin) listener.begin(config.out);
  return run_or_say_where(trainer, run);
}

Outcome resume(const Run& run, const Listener& listener, const Processes& processes) {
  const auto note = [&](const std::string& text) {
    if (listener.note) listener.note(text);
  };
  if (listener.begin) listener.begin(run.config.out);
  if (run.state.step == run.config.steps && run.state.validation_loss) {
    if (processes.writes()) {  // it may have been killed before doing this
      prune_checkpoints(run.config.out, run.config.keep);
    }
    note("the run is finished: all " + std::to_string(run.state.step) + " steps are done");
    return {
        .folder = run.config.out,
        .step = run.state.step,
        .validation_loss = *run.state.validation_loss,
        .checkpoint = run.checkpoint};
  }
  for (const auto& text : run.notes) note(text);
  require_training_memory(run.config);
  at::set_num_threads(static_cast<int>(run.config.threads));
  Trainer trainer(run.config, listener, processes);
  if (run.checkpoint.empty()) {
    trainer.initialize();
  } else {
    trainer.load(run);
  }
  if (processes.writes()) {
    take_over(run, processes.count);
    say_run_has_begun(processes);
  }
  return run_or_say_where(trainer, run);
}

}  // namespace train
