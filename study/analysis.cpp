#include "study/analysis.h"

#include <algorithm>
#include <cmath>

namespace study {
namespace {

// Speed and cost over all runs of a setting.
void summarize_cost(const std::vector<const RunResult*>& runs, SettingSummary& summary) {
  double tokens = 0, seconds = 0, optimizer = 0, parted = 0;
  for (const auto* run : runs) {
    seconds += run->seconds;
    tokens += run->tokens_per_second * run->seconds;
    if (std::isfinite(run->optimizer_share)) {
      parted += run->seconds;
      optimizer += run->optimizer_share * run->seconds;
    }
    summary.slowest = std::fmin(summary.slowest, run->tokens_per_second);
    summary.fastest = std::fmax(summary.fastest, run->tokens_per_second);
  }
  if (runs.empty()) return;
  summary.tokens_per_second = tokens / seconds;
  summary.optimizer_share = optimizer / parted;
  summary.seconds = seconds / static_cast<double>(runs.size());
}

std::vector<double> values_of(const std::map<int64_t, double>& losses) {
  std::vector<double> values;
  for (const auto& [seed, loss] : losses) values.push_back(loss);
  return values;
}

void summarize_losses(SettingSummary& summary) {
  summary.loss = summarize(values_of(summary.losses));
  summary.exploratory = summary.loss.count < kEnoughSeeds || summary.failed > 0;
}

SettingSummary summarize_setting(
    const Results& results, const std::string& setting, const std::string& variant) {
  SettingSummary summary;
  summary.name = setting;
  std::vector<const RunResult*> runs;
  for (const auto& result : results.runs) {
    if (!result.counts() || result.run.setting != setting || result.run.variant != variant)
      continue;
    summary.losses[result.run.seed] = result.loss;
    runs.push_back(&result);
  }
  summary.failed = failures_of(results, setting, variant);
  summarize_losses(summary);
  summarize_cost(runs, summary);
  const auto curves = curves_of(results, setting, variant);
  std::vector<Curve> all;
  for (const auto& [seed, curve] : curves) all.push_back(curve);
  summary.curve = band_of(all);
  for (const std::string baseline : kBaselines) {
    if (setting == baseline) continue;
    const Band band = band_of(differences_of(curves, curves_of(results, baseline, variant)));
    if (band.count > 0) summary.differences[baseline] = band;
  }
  return summary;
}

// Every setting against the baseline.
void compare(const std::string& baseline, VariantSummary& summary) {
  const auto* base = summary.find(baseline);
  if (base == nullptr) return;
  for (const bool exploratory : {false, true}) {
    std::vector<std::pair<SettingSummary*, std::vector<double>>> family;
    for (auto& setting : summary.settings) {
      if (setting.name == baseline) continue;
      auto differences = differences_of(setting.losses, base->losses);
      const auto count = static_cast<int64_t>(differences.size());
      const bool few = count < kEnoughSeeds || setting.failed + base->failed > 0;
      if (count == 0 || few != exploratory) continue;
      family.emplace_back(&setting, std::move(differences));
    }
    std::vector<double> p;
    for (auto& [setting, differences] : family) {
      BaselineComparison comparison;
      comparison.family = static_cast<int64_t>(family.size());
      comparison.difference = paired(differences, comparison.family);
      comparison.exploratory = exploratory;
      comparison.mark = mark_of(comparison.difference);
      p.push_back(comparison.difference.p);
      setting->against[baseline] = comparison;
    }
    const auto corrected = holm(p);
    for (size_t i = 0; i < family.size(); ++i)
      family[i].first->against[baseline].holm = corrected[i];
  }
}

VariantSummary summarize_variant(
    const Study& study, const Results& results, const std::string& name,
    const train::Options& options, const std::vector<std::string>& settings) {
  VariantSummary summary{name, options, {}};
  for (const auto& setting : settings) {
    summary.settings.push_back(summarize_setting(results, setting, name));
    summary.settings.back().title = find_setting(study, setting).title;
    for (const auto& own : study.own_settings) {
      if (own.name == setting) summary.settings.back().own = own.options;
    }
  }
  for (const std::string baseline : kBaselines) compare(baseline, summary);
  return summary;
}

// The muon-lr of a variant that differs in nothing else; "" for other variants.
std::string rate_of(const VariantSummary& variant) {
  const bool differs_in_rate =
      variant.options.size() == 1 && variant.options.front().first == "muon-lr";
  return differs_in_rate ? variant.options.front().second : "";
}

// Losses of a setting at one learning rate.
struct Tried {
  std::string rate;
  std::map<int64_t, double> losses;
  int64_t failed;
};

// Keeps only seeds that all rates have, so that rates are compared on the same seeds.
void keep_common_seeds(std::vector<Tried>& tried) {
  std::vector<std::map<int64_t, double>> losses;
  for (const auto& one : tried) losses.push_back(one.losses);
  const auto seeds = common_seeds(losses);
  for (auto& one : tried) {
    std::erase_if(one.losses, [&](const auto& item) { return seeds.count(item.first) == 0; });
  }
}

// Each setting at its best learning rate, among those of the study and its variants. A comparison at a single rate
// may only reflect tuning. The best rate is chosen on the seeds that are shown, so all losses are slightly too low.
std::optional<VariantSummary> tune(const Study& study, const Analysis& analysis) {
  const auto own = train::get(train::configure(study.options), train::find_key("muon-lr"));
  std::vector<std::pair<std::string, const VariantSummary*>> rates = {{own, &analysis.main}};
  for (const auto& variant : analysis.variants) {
    if (const auto rate = rate_of(variant); !rate.empty()) rates.emplace_back(rate, &variant);
  }
  if (rates.size() < 2) return std::nullopt;
  VariantSummary tuned{"best muon-lr", {{"muon-lr", "each setting's best on these seeds"}}, {}};
  for (const auto& setting : analysis.main.settings) {
    std::vector<Tried> tried;
    for (const auto& [rate, variant] : rates) {
      const auto* found = variant->find(setting.name);
      if (found == nullptr || found->losses.empty()) continue;
      tried.push_back({rate, found->losses, found->failed});
    }
    keep_common_seeds(tried);
    if (tried.size() < 2 || tried.front().losses.empty()) continue;
    const auto& best =
        *std::min_element(tried.begin(), tried.end(), [](const Tried& a, const Tried& b) {
          return summarize(values_of(a.losses)).mean < summarize(values_of(b.losses)).mean;
        });
    SettingSummary summary;
    summary.name = setting.name;
    summary.title = setting.title + ", at " + best.rate + " of";
    for (const auto& one : tried) {
      summary.title += (&one == &tried.front() ? " " : ", ") + one.rate;
      summary.failed += one.failed;
    }
    summary.own = setting.own;
    summary.losses = best.losses;
    summarize_losses(summary);
    tuned.settings.push_back(std::move(summary));
  }
  for (const std::string baseline : kBaselines) compare(baseline, tuned);
  return tuned;
}

VariantSummary compare_group_sizes(const Study& study, const Results& results) {
  std::vector<std::string> names;
  std::vector<std::map<int64_t, double>> losses;
  for (const std::string name :
       {"packed", "three-way", "qk-1", "qk-2-random", "qk-3-random", "qk-4-random",
        "qk-6-random"}) {
    auto found = losses_of(results, name);
    if (found.empty()) continue;
    names.push_back(name);
    losses.push_back(std::move(found));
  }
  const auto seeds = common_seeds(losses);
  Results common;
  for (const auto& result : results.runs) {
    if (seeds.count(result.run.seed) == 1) common.runs.push_back(result);
  }
  return summarize_variant(study, common, "", {}, names);
}

std::optional<Noise> measure_noise(const Folder& folder, const Results& results) {
  const std::string& setting = folder.study.noise_setting;
  const auto differences =
      differences_of(losses_of(results, setting, kNoiseVariant), losses_of(results, setting));
  if (differences.empty()) return std::nullopt;
  Noise noise{setting, paired(differences, 1), summarize(differences).deviation, 0};
  for (const double difference : differences) {
    noise.largest = std::max(noise.largest, std::abs(difference));
  }
  return noise;
}

}  // namespace

std::string to_string(Mark mark) {
  switch (mark) {
    case Mark::kBetter:
      return "better";
    case Mark::kWorse:
      return "worse";
    default:
      return "undecided";
  }
}

std::set<int64_t> common_seeds(const std::vector<std::map<int64_t, double>>& losses) {
  std::set<int64_t> seeds;
  if (losses.empty()) return seeds;
  for (const auto& [seed, loss] : losses.front()) {
    const auto has = [&, seed = seed](const auto& other) { return other.count(seed) == 1; };
    if (std::all_of(losses.begin(), losses.end(), has)) seeds.insert(seed);
  }
  return seeds;
}

std::vector<double> differences_of(
    const std::map<int64_t, double>& a, const std::map<int64_t, double>& b) {
  std::vector<double> differences;
  for (const auto& [seed, loss] : a) {
    if (const auto other = b.find(seed); other != b.end()) {
      differences.push_back(loss - other->second);
    }
  }
  return differences;
}

Mark mark_of(const Paired& difference) {
  if (difference.simultaneous_high < 0) return Mark::kBetter;
  if (difference.simultaneous_low > 0) return Mark::kWorse;
  return Mark::kUndecided;
}

const SettingSummary* VariantSummary::find(const std::string& setting) const {
  for (const auto& summary : settings) {
    if (summary.name == setting) return &summary;
  }
  return nullptr;
}

std::map<int64_t, Curve> curves_of(
    const Results& results, const std::string& setting, const std::string& variant) {
  std::map<int64_t, Curve> curves;
  for (const auto& result : results.runs) {
    if (result.counts() && result.run.setting == setting && result.run.variant == variant) {
      curves[result.run.seed] = result.curve;
    }
  }
  return curves;
}

int64_t failures_of(
    const Results& results, const std::string& setting, const std::string& variant) {
  return std::count_if(results.runs.begin(), results.runs.end(), [&](const auto& result) {
    const bool failed = result.state == RunState::kFailed || !result.readable;
    return failed && result.run.setting == setting && result.run.variant == variant;
  });
}

std::map<int64_t, double> losses_of(
    const Results& results, const std::string& setting, const std::string& variant) {
  std::map<int64_t, double> losses;
  for (const auto& [seed, curve] : curves_of(results, setting, variant)) {
    losses[seed] = curve.rbegin()->second;
  }
  return losses;
}

Band band_of(const std::vector<Curve>& curves) {
  Band band;
  band.count = static_cast<int64_t>(curves.size());
  if (curves.empty()) return band;
  for (const auto& [step, first] : curves.front()) {
    std::vector<double> values;
    for (const auto& curve : curves) {
      if (const auto point = curve.find(step); point != curve.end())
        values.push_back(point->second);
    }
    if (values.size() < curves.size()) continue;
    const Interval interval = interval_of(values);
    band.steps.push_back(step);
    band.mean.push_back(interval.mean);
    band.low.push_back(interval.low);
    band.high.push_back(interval.high);
  }
  return band;
}

std::vector<Curve> differences_of(
    const std::map<int64_t, Curve>& a, const std::map<int64_t, Curve>& b) {
  std::vector<Curve> differences;
  for (const auto& [seed, curve] : a) {
    const auto other = b.find(seed);
    if (other == b.end()) continue;
    Curve difference;
    for (const auto& [step, loss] : curve) {
      if (const auto point = other->second.find(step); point != other->second.end()) {
        difference[step] = loss - point->second;
      }
    }
    differences.push_back(std::move(difference));
  }
  return differences;
}

Analysis analyze(const Folder& folder, const Results& results) {
  Analysis analysis;
  analysis.main = summarize_variant(folder.study, results, "", {}, folder.study.settings);
  for (const auto& variant : folder.study.variants) {
    analysis.variants.push_back(
        summarize_variant(folder.study, results, variant.name, variant.options, variant.settings));
  }
  if (auto tuned = tune(folder.study, analysis)) analysis.variants.push_back(std::move(*tuned));
  analysis.group_sizes = compare_group_sizes(folder.study, results);
  analysis.noise = measure_noise(folder, results);
  return analysis;
}

}  // namespace study
