#include "study/analysis.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

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
  const auto& curves = summary.curves = curves_of(results, setting, variant);
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

// A setting beside a baseline, seed by seed.
struct Pairs {
  SettingSummary* setting;
  std::vector<double> losses;  // minus the baseline's
  std::vector<double>
      fractions;      // steps to the baseline's final loss, of its steps, for seeds that get there
  StepsToLoss steps;  // without what depends on other settings
};

Pairs pairs_of(SettingSummary& setting, const SettingSummary& base) {
  Pairs pairs{&setting, differences_of(setting.losses, base.losses), {}, {}};
  auto& steps = pairs.steps;
  for (const auto& [seed, target] : base.curves) {
    const auto curve = setting.curves.find(seed);
    if (curve == setting.curves.end() || target.rbegin()->first == 0) continue;
    ++steps.seeds;
    const auto step = first_step_at(curve->second, target.rbegin()->second);
    if (!step) continue;
    pairs.fractions.push_back(*step / static_cast<double>(target.rbegin()->first));
  }
  steps.reached = static_cast<int64_t>(pairs.fractions.size());
  auto sorted = pairs.fractions;
  std::sort(sorted.begin(), sorted.end());
  // Seeds that never get there come last.
  if (const int64_t upper = steps.seeds / 2; upper < steps.reached) {
    steps.median = (sorted[(steps.seeds - 1) / 2] + sorted[upper]) / 2;
  }
  return pairs;
}

// What a family of comparisons with a baseline says of each of its settings.
void compare_family(const std::string& baseline, bool exploratory, std::vector<Pairs>& family) {
  const auto size = static_cast<int64_t>(family.size());
  std::vector<double> p, steps_p;
  for (auto& [setting, losses, fractions, steps] : family) {
    BaselineComparison comparison;
    comparison.family = size;
    comparison.difference = paired(losses, size);
    comparison.exploratory = exploratory;
    comparison.mark = mark_of(comparison.difference);
    comparison.steps = steps;
    if (steps.seeds > 0 && steps.reached == steps.seeds) {
      for (double& fraction : fractions) fraction -= 1;
      comparison.steps.less = paired(fractions, size);
      comparison.steps.mark = mark_of(*comparison.steps.less);
    }
    p.push_back(comparison.difference.p);
    // One that never gets there counts as a test that found nothing, so that it does not make others look better.
    const double nothing = steps.seeds > 1 ? 1 : kUnknown;
    steps_p.push_back(comparison.steps.less ? comparison.steps.less->p : nothing);
    setting->against[baseline] = comparison;
  }
  const auto corrected = holm(p), steps_corrected = holm(steps_p);
  for (size_t i = 0; i < family.size(); ++i) {
    auto& comparison = family[i].setting->against[baseline];
    comparison.holm = corrected[i];
    if (comparison.steps.less) comparison.steps.holm = steps_corrected[i];
  }
}

// Every setting against the baseline.
void compare(const std::string& baseline, VariantSummary& summary) {
  const auto* base = summary.find(baseline);
  if (base == nullptr) return;
  std::vector<Pairs> tested, exploratory;
  for (auto& setting : summary.settings) {
    if (setting.name == baseline) continue;
    auto pairs = pairs_of(setting, *base);
    if (pairs.losses.empty()) continue;
    const auto count = static_cast<int64_t>(pairs.losses.size());
    const bool few = count < kEnoughSeeds || setting.failed + base->failed > 0;
    (few ? exploratory : tested).push_back(std::move(pairs));
  }
  compare_family(baseline, false, tested);
  compare_family(baseline, true, exploratory);
}

// "QK g = 1, muon-lr = 0.002"
std::string title_of(const Study& study, const std::string& setting) {
  std::string title = find_setting(study, setting).title;
  if (const auto tuned = study.tuned.find(setting); tuned != study.tuned.end()) {
    for (const auto& [key, value] : tuned->second) {
      title.append(", ").append(key).append(" = ").append(value);
    }
  }
  return title;
}

VariantSummary summarize_variant(
    const Study& study, const Results& results, const std::string& name,
    const train::Options& options, const std::vector<std::string>& settings) {
  VariantSummary summary{name, options, {}};
  for (const auto& setting : settings) {
    summary.settings.push_back(summarize_setting(results, setting, name));
    summary.settings.back().title = title_of(study, setting);
    for (const auto& own : study.own_settings) {
      if (own.name == setting) summary.settings.back().own = own.options;
    }
  }
  for (const std::string baseline : kBaselines) compare(baseline, summary);
  return summary;
}

// The numeric option of the optimizer that a variant sets, if it sets nothing else; "" for other variants.
std::string only_key_of(const VariantSummary& variant) {
  if (variant.options.size() != 1) return "";
  const auto& key = train::find_key(variant.options.front().first);
  const std::string_view section = key.section;
  const bool of_optimizer = section == "muon" || section == "adamw";
  return of_optimizer && train::type_of(key) == train::Type::kNumber ? key.name : "";
}

// A setting at one value of an option.
struct Tried {
  std::string value;
  std::map<int64_t, double> losses;
  std::map<int64_t, Curve> curves;
  int64_t failed;
};

// Keeps only seeds that all values with losses have, so that values are compared on the same seeds.
void keep_common_seeds(std::vector<Tried>& tried) {
  std::vector<std::map<int64_t, double>> losses;
  for (const auto& one : tried) {
    if (!one.losses.empty()) losses.push_back(one.losses);
  }
  const auto seeds = common_seeds(losses);
  const auto other = [&](const auto& item) { return seeds.count(item.first) == 0; };
  for (auto& one : tried) {
    std::erase_if(one.losses, other);
    std::erase_if(one.curves, other);
  }
}

// What a setting was tried with: the study's own value, then those of variants. Values without finished or failed runs
// are left out.
std::vector<Tried> tried_of(
    const Study& study, const Analysis& analysis, const std::string& key,
    const std::string& setting) {
  auto options = study.options;
  const auto more = setting_options(study, setting);
  options.insert(options.end(), more.begin(), more.end());
  std::vector<Tried> tried;
  const auto add = [&](const std::string& value, const VariantSummary& variant) {
    const auto* found = variant.find(setting);
    if (found == nullptr || (found->losses.empty() && found->failed == 0)) return;
    tried.push_back({value, found->losses, found->curves, found->failed});
  };
  add(train::get(train::configure(options), train::find_key(key)), analysis.main);
  for (const auto& variant : analysis.variants) {
    if (only_key_of(variant) == key) add(variant.options.front().second, variant);
  }
  keep_common_seeds(tried);
  return tried;
}

double mean_of(const Tried& tried) { return summarize(values_of(tried.losses)).mean; }

ValueChoice choice_of(std::vector<Tried> tried, const Tried& best, const SettingSummary& setting) {
  ValueChoice choice{setting.name, setting.title, {}, best.value};
  const auto number = [](const std::string& text) { return std::strtod(text.c_str(), nullptr); };
  std::stable_sort(tried.begin(), tried.end(), [&](const Tried& a, const Tried& b) {
    return number(a.value) < number(b.value);
  });
  std::vector<std::string> with_losses;
  for (const auto& one : tried) {
    choice.tried.push_back({one.value, summarize(values_of(one.losses)), one.failed});
    if (!one.losses.empty()) with_losses.push_back(one.value);
  }
  choice.at_edge = best.value == with_losses.front() || best.value == with_losses.back();
  return choice;
}

// Each setting at its best value of the option, among those of the study and its variants. A comparison at a single
// learning rate may only reflect tuning. The best is chosen on the seeds that are shown, so all losses are slightly too
// low.
void tune(const Study& study, const std::string& key, Analysis& analysis) {
  BestValues all{key, {}};
  VariantSummary tuned{"best " + key, {{key, "each setting's best on these seeds"}}, {}};
  for (const auto& setting : analysis.main.settings) {
    const auto tried = tried_of(study, analysis, key, setting.name);
    std::vector<const Tried*> with_losses;
    for (const auto& one : tried) {
      if (!one.losses.empty()) with_losses.push_back(&one);
    }
    if (with_losses.size() < 2) continue;
    const Tried& best = **std::min_element(
        with_losses.begin(), with_losses.end(),
        [](const Tried* a, const Tried* b) { return mean_of(*a) < mean_of(*b); });
    all.settings.push_back(choice_of(tried, best, setting));
    SettingSummary summary;
    summary.name = setting.name;
    summary.title = setting.title + ", at " + best.value + " of";
    for (const auto* one : with_losses) {
      summary.title += (one == with_losses.front() ? " " : ", ") + one->value;
      summary.failed += one->failed;
    }
    summary.own = setting.own;
    summary.losses = best.losses;
    summary.curves = best.curves;
    summarize_losses(summary);
    tuned.settings.push_back(std::move(summary));
  }
  for (const std::string baseline : kBaselines) compare(baseline, tuned);
  if (all.settings.empty()) return;
  analysis.best_values.push_back(std::move(all));
  analysis.variants.push_back(std::move(tuned));
}

// The options that alone tell variants apart, in the order of the variants.
std::vector<std::string> keys_of_variants(const Analysis& analysis) {
  std::vector<std::string> keys;
  for (const auto& variant : analysis.variants) {
    const std::string key = only_key_of(variant);
    if (!key.empty() && std::find(keys.begin(), keys.end(), key) == keys.end()) keys.push_back(key);
  }
  return keys;
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

std::optional<double> first_step_at(const Curve& curve, double loss) {
  for (auto point = curve.begin(); point != curve.end(); ++point) {
    if (!(point->second <= loss)) continue;
    const auto step = static_cast<double>(point->first);
    if (point == curve.begin()) return step;
    const auto [before, above] = *std::prev(point);
    if (!std::isfinite(above)) return step;
    const double part = (above - loss) / (above - point->second);
    return static_cast<double>(before) + part * (step - static_cast<double>(before));
  }
  return std::nullopt;
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
  for (const auto& key : keys_of_variants(analysis)) tune(folder.study, key, analysis);
  analysis.group_sizes = compare_group_sizes(folder.study, results);
  analysis.noise = measure_noise(folder, results);
  return analysis;
}

}  // namespace study
