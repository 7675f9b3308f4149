#include "study/cost.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>

#include "gpt/model.h"
#include "group_muon/assemble.h"
#include "train/memory.h"
#include "train/recipe.h"
#include "train/run.h"

namespace study {
namespace {

using Clock = std::chrono::steady_clock;

template <typename Work>
double seconds_of(Work&& work) {
  const auto start = Clock::now();
  work();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Times {
  double micro_batch = INFINITY, optimizer = INFINITY, validation_batch = INFINITY;
};

// Takes the fastest of a few rounds: the first one allocates memory, and the machine may be busy.
Times measure(const train::Config& config) {
  train::require_training_memory(config);
  const torch::Device device(config.device);
  gpt::Model model(train::model_shape(config), train::matmul_precision(config.precision), 0);
  model.to(device);
  model.set_engine(group_muon::parse_engine(config.engine));
  auto optimizer = group_muon::assemble(model, train::optimizer_options(config));
  const auto tokens = at::randint(
      config.vocabulary, {config.micro_batch, config.context}, at::dtype(at::kLong).device(device));
  const auto fastest = [](double& time, auto&& work) { time = std::min(time, seconds_of(work)); };
  Times times;
  for (int round = 0; round < 3; ++round) {
    optimizer.zero_grad();
    fastest(times.micro_batch, [&] { model.add_gradients(tokens, tokens, 1); });
    fastest(times.optimizer, [&] { optimizer.step(); });
  }
  model.set_precision(train::matmul_precision(config.validation_precision));
  for (int round = 0; round < 2; ++round) {
    fastest(times.validation_batch, [&] { model.evaluate(tokens, tokens); });
  }
  return times;
}

double ratio(int64_t a, int64_t b) { return static_cast<double>(a) / static_cast<double>(b); }

double seconds_of_run(const train::Config& config, const Times& times) {
  const double step = times.micro_batch * ratio(config.batch, config.micro_batch) + times.optimizer;
  const double validation =
      times.validation_batch * ratio(config.validation_tokens, config.context * config.micro_batch);
  const double validations = ratio(config.steps, config.validation_interval) + 1;
  return step * static_cast<double>(config.steps) + validation * validations;
}

// Identifies configs whose steps take the same time.
std::string shape_key(train::Config config) {
  config.out.clear();
  config.seed = config.perturb = 0;
  config.steps = config.warmdown = config.validation_interval = 1;
  config.adamw_lr = 0;
  config.muon.lr(0);
  config.qkv = "split";
  config.qk_group = config.v_group = "all";
  return train::to_toml(config);
}

}  // namespace

double checkpoint_bytes(const train::Config& config) {
  // Weights and momentum; AdamW has two buffers.
  return 4 * (2 * train::block_weights(config) + 3 * train::embedding_weights(config));
}

double memory_of(const train::Config& config) {
  constexpr double kLibraries = 300 << 20;
  // Bytes per token: what each block keeps for its backward pass, and three copies of the token's logits.
  const double token = static_cast<double>(config.layers) * static_cast<double>(config.width) * 80 +
                       static_cast<double>(config.vocabulary) * 12;
  const double weights = train::block_weights(config) + train::embedding_weights(config);
  return kLibraries + 28 * weights +
         static_cast<double>(config.micro_batch) * static_cast<double>(config.context) * token;
}

Cost estimate_cost(const Folder& folder, const std::string& device, int64_t jobs, int64_t threads) {
  at::set_num_threads(static_cast<int>(threads));
  Cost cost;
  std::map<std::string, Times> known;
  double largest = 0, largest_checkpoints = 0, longest = 0;
  auto first = train::resolved(config_of(folder, folder.plan.front(), threads, device));
  for (auto* word :
       {&first.precision, &first.muon.precision(), &first.validation_precision, &first.engine,
        &first.muon.engine(), &first.muon.method()}) {
    *word = "auto";  // each run resolves its own
  }
  for (const auto& run : folder.plan) {
    const auto config =
        train::with_engine(train::filled_in(config_of(folder, run, threads, device), first));
    cost.runs += 1;
    largest = std::max(largest, memory_of(config));
    const double checkpoints =
        static_cast<double>(config.keep + 1) * checkpoint_bytes(config);  // plus the best
    largest_checkpoints = std::max(largest_checkpoints, checkpoints);
    if (folder.study.keep_checkpoints) cost.disk += checkpoints;
    const auto status = status_of(folder, run);
    if (status.state == RunState::kFinished || status.state == RunState::kFailed) continue;
    const double part = 1 - status.fraction;
    const auto [place, is_new] = known.try_emplace(shape_key(config));
    if (is_new) place->second = measure(config);
    cost.left += 1;
    const double tokens = part * static_cast<double>(config.steps * config.batch * config.context);
    cost.tokens += tokens;
    cost.flops += tokens * gpt::training_flops_per_token(train::model_shape(config));
    const double seconds = part * seconds_of_run(config, place->second);
    cost.job_seconds += seconds;
    longest = std::max(longest, seconds);
  }
  cost.seconds = std::max(longest, cost.job_seconds / static_cast<double>(jobs));
  if (!folder.study.keep_checkpoints) cost.disk = static_cast<double>(jobs) * largest_checkpoints;
  cost.memory = largest * static_cast<double>(jobs);
  return cost;
}

}  // namespace study
