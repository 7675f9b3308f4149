#include "train/analyze.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>

#include "gpt/shards.h"
#include "train/batch.h"
#include "train/candidates.h"
#include "train/checkpoint.h"
#include "train/direct_test.h"
#include "train/memory.h"
#include "train/norms.h"
#include "train/recipe.h"
#include "train/run.h"

namespace train {
namespace {

using group_muon::Whitening;
using torch::Tensor;

// Index of the largest value, the first one in a tie. Never picks NaN over a number.
template <typename Value>
size_t best_of(const std::vector<CandidateResult>& candidates, Value&& value) {
  size_t best = 0;
  for (size_t i = 1; i < candidates.size(); ++i) {
    const double other = value(candidates[i]);
    if (other > value(candidates[best]) || std::isnan(value(candidates[best]))) best = i;
  }
  return best;
}

// The run's model, optimizer and data at a checkpoint. The model computes in fp32 to resolve small loss differences.
class RestoredRun {
 public:
  RestoredRun(const AnalyzeOptions& options, const SavedRun& saved);

  const Config& config() const { return config_; }
  int64_t step() const { return state_.step; }
  double lr() const { return lr_; }
  const gpt::Model& model() const { return model_; }
  std::vector<AttentionWeight> weights() { return attention_weights(optimizer_, clip_); }

  Losses losses() { return {mean_loss(model_, batch_), mean_loss(model_, held_out_)}; }

 private:
  void take_gradients();

  Config config_;
  gpt::Model model_;
  group_muon::GroupMuon optimizer_;
  TrainerState state_;
  double lr_ = 0;
  double clip_ = 1;  // factor applied to the gradient
  gpt::TokenStream training_, validation_;
  Batch batch_, held_out_;
};

Config config_of(const AnalyzeOptions& options, Config config) {
  if (!options.data.empty()) config.data = options.data;
  if (options.threads > 0) config.threads = options.threads;
  require_training_memory(config);
  return with_engine(without_missing_engines(config));
}

RestoredRun::RestoredRun(const AnalyzeOptions& options, const SavedRun& saved)
    : config_(config_of(options, saved.config)),
      model_(model_shape(config_), torch::kFloat32, /*seed=*/0),
      optimizer_(group_muon::assemble(model_, optimizer_options(config_))),
      training_(config_.data, "train", config_.vocabulary),
      validation_(config_.data, "val", config_.vocabulary),
      batch_{&training_, {}, config_.context, config_.micro_batch},
      held_out_{&validation_, {}, config_.context, config_.micro_batch} {
  if (config_.threads > 0) at::set_num_threads(static_cast<int>(config_.threads));
  model_.set_engine(group_muon::parse_engine(config_.engine));
  state_ = load_checkpoint(saved.checkpoint, model_, optimizer_);
  const bool finished = state_.step >= config_.steps;
  lr_ = options.lr > 0 ? options.lr
                       : config_.muon.lr() * (finished ? 1 : lr_factor(config_, state_.step));
  TORCH_CHECK_VALUE(lr_ > 0, "the learning rate of this run is 0; set another with --lr");
  for (auto& group : optimizer_.param_groups()) {
    if (auto* options = group_muon::muon_options(group)) options->lr(lr_);
  }

  const gpt::SequenceOrder order(
      training_.size(), config_.context, static_cast<uint64_t>(config_.seed), config_.shuffle);
  const gpt::SequenceOrder held_out(validation_.size(), config_.context, 0);
  const int64_t wanted = options.sequences > 0 ? options.sequences : config_.batch;
  TORCH_CHECK_VALUE(
      options.sequences <= std::min(order.windows(), held_out.windows()),
      "sequences should be at most ", std::min(order.windows(), held_out.windows()),
      ", all that the data has, not ", options.sequences);
  for (int64_t i = 0; i < wanted; ++i) {
    batch_.starts.push_back(order.start_of(state_.step * config_.batch + i));
  }
  for (int64_t i = 0; i < std::min(wanted, held_out.windows()); ++i) {
    held_out_.starts.push_back(held_out.start_of(i));
  }
  take_gradients();
}

// Computes the gradients of the next step, clipped as in training.
void RestoredRun::take_gradients() {
  add_gradients(model_, batch_);
  std::vector<Tensor> gradients;
  for (const auto& parameter : model_.parameters()) gradients.push_back(parameter.grad());
  const double norm = norm_of(gradients);
  TORCH_CHECK(std::isfinite(norm), "the gradient norm is ", norm, " at this checkpoint");
  if (config_.clip > 0 && norm > config_.clip) {
    clip_ = config_.clip / norm;
    at::_foreach_mul_(gradients, clip_);
  }
}

// "transformer.h.3.attn.c_attn.weight" → 3
int64_t layer_of(const std::string& name) {
  constexpr std::string_view kBefore = ".h.";
  return std::stoll(name.substr(name.find(kBefore) + kBefore.size()));
}

std::vector<AttentionWeight> chosen_weights(RestoredRun& run, const std::vector<int64_t>& layers) {
  const int64_t last = run.model().shape().layers - 1;
  for (const auto layer : layers) {
    TORCH_CHECK_VALUE(
        layer >= 0 && layer <= last, "layers should be from 0 to ", last, ", not ", layer);
  }
  std::vector<AttentionWeight> chosen;
  for (const auto& weight : run.weights()) {
    const auto layer = layer_of(weight.weight.name);
    if (layers.empty() || std::find(layers.begin(), layers.end(), layer) != layers.end()) {
      chosen.push_back(weight);
    }
  }
  return chosen;
}

// A region, and its index in what was measured on its weights: 0 for all rows, then Q, K and V.
struct MeasuredRegion {
  Region region;
  size_t part = 0;
};

std::vector<MeasuredRegion> regions_of(
    const std::vector<AttentionWeight>& weights, const group_muon::Layout& three_way) {
  std::vector<MeasuredRegion> regions;
  Region all{"all", {}};
  for (size_t w = 0; w < weights.size(); ++w) {
    const auto layer = std::to_string(layer_of(weights[w].weight.name));
    for (size_t i = 0; i < three_way.segments.size(); ++i) {
      const auto& segment = three_way.segments[i];
      const Piece piece{w, segment.head_starts.front(), segment.num_rows()};
      regions.push_back({{layer + "." + segment.name, {piece}}, 1 + i});
    }
    const Piece rows{w, 0, weights[w].weight.value.size(0)};
    regions.push_back({{layer + ".qkv", {rows}}, 0});
    all.pieces.push_back(rows);
  }
  regions.push_back({all, 0});
  return regions;
}

// Sum of the measurements over all pieces of a region.
Whitening sum_over(
    const MeasuredRegion& region, const std::vector<std::vector<Measured>>& measured, size_t tensor,
    size_t candidate) {
  const auto& pieces = region.region.pieces;
  const auto part = [&](size_t i) {
    return measured[pieces[i].weight][tensor].by_candidate[candidate][region.part];
  };
  Whitening sum = part(0);
  for (size_t i = 1; i < pieces.size(); ++i) sum = sum + part(i);
  return sum;
}

CriterionCheck judge(
    const std::vector<CandidateResult>& candidates, double factor, double lr, double beta,
    const Losses& noise) {
  const auto same = [&](const CandidateResult& c) { return find_step(c, factor, false).decrease; };
  const auto held_out = [&](const CandidateResult& c) {
    return find_step(c, factor, false).held_out_decrease;
  };
  CriterionCheck check;
  check.factor = factor;
  check.favoured = best_of(candidates, [&](const CandidateResult& c) {
    return group_muon::guaranteed_decrease(c.momentum, lr * factor, std::max(0.0, beta));
  });
  check.first_order =
      best_of(candidates, [](const CandidateResult& c) { return c.momentum.first_order; });
  check.best = best_of(candidates, same);
  check.best_held_out = best_of(candidates, held_out);
  const auto as_good = [&](size_t chosen, size_t best, auto&& decrease, double floor) {
    return decrease(candidates[best]) - decrease(candidates[chosen]) <= 2 * floor;
  };
  check.agrees = as_good(check.favoured, check.best, same, noise.same);
  check.first_order_agrees = as_good(check.first_order, check.best, same, noise.same);
  check.agrees_held_out = as_good(check.favoured, check.best_held_out, held_out, noise.held_out);
  return check;
}

void check_options(const AnalyzeOptions& options) {
  for (const double factor : options.factors) {
    TORCH_CHECK_VALUE(
        factor > 0 && std::isfinite(factor), "factors should be above 0, not ", factor);
    TORCH_CHECK_VALUE(
        std::count(options.factors.begin(), options.factors.end(), factor) == 1, "factor ", factor,
        " is given twice");
  }
  TORCH_CHECK_VALUE(
      options.lr >= 0 && std::isfinite(options.lr), "lr should be above 0, not ", options.lr);
  TORCH_CHECK_VALUE(
      options.sequences >= 0, "sequences should be 1 or more, not ", options.sequences);
  TORCH_CHECK_VALUE(
      options.threads >= 0 && options.threads <= 1024, "threads should be from 1 to 1024, not ",
      options.threads);
  TORCH_CHECK_VALUE(
      std::find(options.factors.begin(), options.factors.end(), 1) != options.factors.end(),
      "one of the factors should be 1, the learning rate itself");
}

}  // namespace

const DirectStep& find_step(const CandidateResult& candidate, double factor, bool rescaled) {
  for (const auto& step : candidate.steps) {
    if (step.factor == factor && step.rescaled == rescaled) return step;
  }
  TORCH_CHECK_VALUE(
      false, candidate.candidate, " was not tried at ", factor, " times the learning rate");
}

const CriterionCheck& check_at(const MatrixResult& matrix, double factor) {
  for (const auto& check : matrix.checks) {
    if (check.factor == factor) return check;
  }
  TORCH_CHECK_VALUE(false, "nothing was tried at ", factor, " times the learning rate");
}

CheckpointAnalysis analyze(
    const AnalyzeOptions& options, const std::function<void(double)>& progress) {
  check_options(options);
  const auto saved = read_trained_run(options.path);
  CheckpointAnalysis analysis;
  analysis.checkpoint = saved.checkpoint;
  if (progress) progress(0);
  RestoredRun run(options, saved);
  const auto candidates = make_candidates(
      run.model().shape(), options.groups, run.config().share_qk, run.config().qkv_lr);
  const auto weights = chosen_weights(run, options.layers);
  const auto regions = regions_of(weights, candidates[kThreeWay].layout);
  analysis.step = run.step();
  analysis.lr = run.lr();
  const auto measured = measure_weights(  // [weight][gradient, momentum]
      weights, candidates,
      options.exact ? group_muon::Accuracy::kExact : group_muon::Accuracy::kEstimate);

  DirectTest test(weights, candidates, analysis.lr, [&] { return run.losses(); });
  const auto noise = test.noise();
  analysis.loss = test.before().same;
  analysis.held_out_loss = test.before().held_out;
  analysis.noise = noise.same;
  analysis.held_out_noise = noise.held_out;

  const auto total =
      static_cast<double>(2 * regions.size() * candidates.size() * options.factors.size());
  double done = 0;
  for (const auto& region : regions) {
    MatrixResult result;
    result.name = region.region.name;
    for (size_t c = 0; c < candidates.size(); ++c) {
      CandidateResult candidate;
      candidate.candidate = candidates[c].name;
      candidate.gradient = sum_over(region, measured, 0, c);
      candidate.momentum = sum_over(region, measured, 1, c);
      for (const bool rescaled : {false, true}) {
        for (const double factor : options.factors) {
          if (!rescaled || c != kThreeWay) {  // three-way already has that norm
            candidate.steps.push_back(test.step(region.region, c, factor, rescaled));
          }
          if (progress) progress(++done / total);
        }
      }
      result.candidates.push_back(std::move(candidate));
    }
    const auto& full = find_step(result.candidates[kThreeWay], 1, false);
    result.beta = full.curvature;
    result.beta_noise = 2 * noise.same / (full.norm * full.norm);
    for (const double factor : options.factors) {
      result.checks.push_back(judge(result.candidates, factor, analysis.lr, result.beta, noise));
    }
    analysis.matrices.push_back(std::move(result));
  }
  return analysis;
}

}  // namespace train
