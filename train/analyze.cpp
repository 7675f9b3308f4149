#include "train/analyze.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>

#include "gpt/shards.h"
#include "train/attention.h"
#include "train/batch.h"
#include "train/checkpoint.h"
#include "train/config.h"
#include "train/direct_test.h"
#include "train/recipe.h"

namespace train {
namespace {

using group_muon::Whitening;
using torch::Tensor;

constexpr size_t kThreeWay = 1;  // of the candidates, after packed

// The largest, the first of equals.
template <typename Value>
size_t best_of(const std::vector<CandidateResult>& candidates, Value&& value) {
  size_t best = 0;
  for (size_t i = 1; i < candidates.size(); ++i) {
    if (value(candidates[i]) > value(candidates[best])) best = i;
  }
  return best;
}

// The run's model, optimizers and data at a checkpoint. Everything in fp32, so that losses can be told apart.
class Bench {
 public:
  Bench(const AnalyzeOptions& options, const Place& place, const std::string& checkpoint);

  const Config& config() const { return config_; }
  int64_t step() const { return state_.step; }
  double lr() const { return lr_; }
  const gpt::Model& model() const { return model_; }
  std::vector<AttentionWeight> weights() { return attention_weights(optimizers_.muon); }

  Losses losses() { return {loss(batch_), loss(held_out_)}; }

 private:
  double loss(const std::vector<Batch>& batches);

  Config config_;
  gpt::Model model_;
  group_muon::Optimizers optimizers_;
  TrainerState state_;
  double lr_ = 0;
  std::vector<Batch> batch_, held_out_;
};

Config config_of(const AnalyzeOptions& options, const Place& place) {
  auto config = configure(read_settings(place.run + "/config.toml"));
  if (!options.data.empty()) config.data = options.data;
  if (options.threads > 0) config.threads = options.threads;
  config.method = resolved_method(config);
  return config;
}

// Some sequences at a time.
std::vector<Batch> batches_of(
    const gpt::TokenStream& stream, const std::vector<int64_t>& starts, const Config& config) {
  std::vector<Batch> batches;
  const auto most = static_cast<size_t>(std::max<int64_t>(1, config.micro_batch));
  for (size_t first = 0; first < starts.size(); first += most) {
    const auto from = starts.begin() + static_cast<int64_t>(first);
    const auto count = static_cast<int64_t>(std::min(most, starts.size() - first));
    batches.push_back(read_batch(stream, {from, from + count}, config.context, at::kCPU));
  }
  return batches;
}

Bench::Bench(const AnalyzeOptions& options, const Place& place, const std::string& checkpoint)
    : config_(config_of(options, place)),
      model_(model_shape(config_), torch::kFloat32, /*seed=*/0),
      optimizers_(group_muon::assemble(model_, optimizer_options(config_))) {
  if (config_.threads > 0) at::set_num_threads(static_cast<int>(config_.threads));
  model_.set_kernels(gpt::parse_kernels(config_.kernels, at::kCPU));
  try {
    state_ = load_checkpoint(checkpoint, model_, optimizers_);
  } catch (const c10::Error& error) {
    TORCH_CHECK_VALUE(
        false, "checkpoint '", checkpoint, "' is not of the model that ", place.run,
        "/config.toml describes: ", error.what_without_backtrace());
  }
  // After its last step a run has no learning rate: that of the last step made, then.
  const double now = lr_factor(config_, state_.step);
  lr_ =
      config_.muon_lr * (now > 0 ? now : lr_factor(config_, std::max<int64_t>(0, state_.step - 1)));
  for (auto& group : optimizers_.muon.param_groups()) group.options().set_lr(lr_);

  const gpt::TokenStream training(config_.data, "train", config_.vocabulary);
  const gpt::TokenStream validation(config_.data, "val", config_.vocabulary);
  const gpt::SequenceOrder order(
      training.size(), config_.context, static_cast<uint64_t>(config_.seed), config_.shuffle);
  const gpt::SequenceOrder held_out(validation.size(), config_.context, 0);
  const int64_t wanted = options.sequences > 0 ? options.sequences : config_.batch;
  std::vector<int64_t> starts, held_out_starts;
  for (int64_t i = 0; i < wanted; ++i) {
    starts.push_back(order.start_of(state_.step * config_.batch + i));
  }
  for (int64_t i = 0; i < std::min(wanted, held_out.windows()); ++i) {
    held_out_starts.push_back(held_out.start_of(i));
  }
  batch_ = batches_of(training, starts, config_);
  held_out_ = batches_of(validation, held_out_starts, config_);
  // The gradient, as the next step would have it.
  int64_t sequences = 0;
  for (const auto& batch : batch_) sequences += batch.tokens.size(0);
  for (const auto& [tokens, targets] : batch_) {
    model_.add_gradients(
        tokens, targets, static_cast<double>(tokens.size(0)) / static_cast<double>(sequences));
  }
}

double Bench::loss(const std::vector<Batch>& batches) {
  double sum = 0;
  int64_t sequences = 0;
  for (const auto& [tokens, targets] : batches) {
    sum += model_.evaluate(tokens, targets) * static_cast<double>(tokens.size(0));
    sequences += tokens.size(0);
  }
  return sum / static_cast<double>(sequences);
}

// Sums of what was measured on the pieces of a region.
Whitening sum_of(const std::vector<Whitening>& parts) {
  Whitening sum = parts.front();
  for (size_t i = 1; i < parts.size(); ++i) {
    const auto& part = parts[i];
    sum.rows += part.rows;
    sum.blocks += part.blocks;
    sum.first_order += part.first_order;
    sum.squared_norm += part.squared_norm;
    sum.step_squared_norm += part.step_squared_norm;
    if (!sum.of_blocks || !part.of_blocks) {
      sum.of_blocks.reset();
      continue;
    }
    sum.of_blocks->nuclear_norm += part.of_blocks->nuclear_norm;
    sum.of_blocks->stable_rank += part.of_blocks->stable_rank;
    sum.of_blocks->effective_rank += part.of_blocks->effective_rank;
    sum.of_blocks->quantiles.clear();
    for (size_t r = 0; r < group_muon::kRanks; ++r) {
      sum.of_blocks->ranks[r] += part.of_blocks->ranks[r];
    }
  }
  return sum;
}

// "transformer.h.3.attn.c_attn.weight" → 3
int64_t layer_of(const std::string& name) {
  constexpr std::string_view kBefore = ".h.";
  return std::stoll(name.substr(name.find(kBefore) + kBefore.size()));
}

std::vector<AttentionWeight> chosen_weights(Bench& bench, const std::vector<int64_t>& layers) {
  const int64_t last = bench.model().shape().layers - 1;
  for (const auto layer : layers) {
    TORCH_CHECK_VALUE(
        layer >= 0 && layer <= last, "layers are from 0 to ", last, ", there is no ", layer);
  }
  std::vector<AttentionWeight> chosen;
  for (const auto& weight : bench.weights()) {
    const auto layer = layer_of(weight.weight.name);
    if (layers.empty() || std::find(layers.begin(), layers.end(), layer) != layers.end()) {
      chosen.push_back(weight);
    }
  }
  return chosen;
}

std::vector<Region> regions_of(
    const std::vector<AttentionWeight>& weights, const group_muon::Layout& three_way) {
  std::vector<Region> regions;
  Region all{"all", {}};
  for (size_t w = 0; w < weights.size(); ++w) {
    const auto layer = std::to_string(layer_of(weights[w].weight.name));
    for (const auto& segment : three_way.segments) {
      const Piece piece{w, segment.head_starts.front(), segment.num_rows()};
      regions.push_back({layer + "." + segment.name, {piece}});
    }
    all.pieces.push_back({w, 0, weights[w].weight.value.size(0)});
  }
  regions.push_back(all);
  return regions;
}

void check_options(const AnalyzeOptions& options) {
  for (const double factor : options.factors) {
    TORCH_CHECK_VALUE(factor > 0, "factors should be above 0, not ", factor);
  }
  TORCH_CHECK_VALUE(
      std::find(options.factors.begin(), options.factors.end(), 1) != options.factors.end(),
      "one of the factors should be 1: the learning rate as it is");
}

std::string choose_checkpoint(const Place& place) {
  const auto all = list_checkpoints(place.run);
  TORCH_CHECK_VALUE(!all.empty(), "'", place.run, "' has no checkpoint yet");
  const std::string chosen = place.checkpoint.empty() ? all.back() : place.checkpoint;
  require_whole(chosen, all, /*weights_only=*/false, "give that: ");
  return chosen;
}

}  // namespace

const DirectStep& find_step(const CandidateResult& candidate, double factor, bool rescaled) {
  for (const auto& step : candidate.steps) {
    if (step.factor == factor && step.rescaled == rescaled) return step;
  }
  TORCH_CHECK_VALUE(
      false, candidate.candidate, " was not tried at ", factor, " times the learning rate");
}

Analysis analyze(const AnalyzeOptions& options, const std::function<void(double)>& progress) {
  check_options(options);
  const auto place = locate(options.path);
  Analysis analysis;
  analysis.checkpoint = choose_checkpoint(place);
  Bench bench(options, place, analysis.checkpoint);
  const auto candidates = make_candidates(bench.model().shape(), options.groups);
  const auto weights = chosen_weights(bench, options.layers);
  const auto regions = regions_of(weights, candidates[kThreeWay].layout);
  analysis.step = bench.step();
  analysis.lr = bench.lr();

  const double total = static_cast<double>(regions.size() * candidates.size()) *
                       static_cast<double>(2 * options.factors.size());
  double done = 0;
  const auto advance = [&] {
    if (progress) progress(++done / total);
  };
  if (progress) progress(0);

  const auto measured = measure_weights(  // [weight][gradient, momentum]
      weights, candidates,
      options.exact ? group_muon::Accuracy::kExact : group_muon::Accuracy::kEstimate);
  DirectTest test(weights, candidates, analysis.lr, [&] { return bench.losses(); });
  analysis.loss = test.before().same;
  analysis.held_out_loss = test.before().held_out;
  const auto noise = test.noise();
  analysis.noise = noise.same;
  analysis.held_out_noise = noise.held_out;

  for (size_t r = 0; r < regions.size(); ++r) {
    const auto& region = regions[r];
    const size_t parts = candidates[kThreeWay].layout.segments.size();
    const size_t part = region.pieces.size() == 1 && region.name != "all" ? 1 + r % parts : 0;
    MatrixResult result;
    result.name = region.name;
    for (size_t c = 0; c < candidates.size(); ++c) {
      CandidateResult candidate;
      candidate.candidate = candidates[c].name;
      std::vector<Whitening> gradients, momenta;
      for (const auto& piece : region.pieces) {
        gradients.push_back(measured[piece.weight][0].by_candidate[c][part]);
        momenta.push_back(measured[piece.weight][1].by_candidate[c][part]);
      }
      candidate.gradient = sum_of(gradients);
      candidate.momentum = sum_of(momenta);
      for (const bool rescaled : {false, true}) {
        for (const double factor : options.factors) {
          if (!rescaled || c != kThreeWay) {  // which has that norm already
            candidate.steps.push_back(test.step(region, c, factor, rescaled));
          }
          advance();
        }
      }
      result.candidates.push_back(std::move(candidate));
    }
    result.beta = find_step(result.candidates[kThreeWay], 1, false).curvature;
    for (auto& candidate : result.candidates) {
      candidate.guaranteed = group_muon::guaranteed_decrease(
          candidate.momentum, analysis.lr, std::max(0.0, result.beta));
    }
    result.favoured = best_of(result.candidates, [](const auto& c) { return c.guaranteed; });
    result.best =
        best_of(result.candidates, [](const auto& c) { return find_step(c, 1, false).decrease; });
    result.best_held_out = best_of(
        result.candidates, [](const auto& c) { return find_step(c, 1, false).held_out_decrease; });
    analysis.matrices.push_back(std::move(result));
  }
  return analysis;
}

}  // namespace train
