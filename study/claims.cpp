#include "study/claims.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <compare>

#include "study/settings.h"
#include "study/text.h"

namespace study {
namespace {

constexpr double kLevel = 0.05;
constexpr int kSizes[] = {1, 2, 3, 4, 6};
constexpr size_t kVSettings = 9;  // of V alone, and of V with QK fixed
constexpr const char* kWholeOrSingle[] = {"packed", "three-way", "head-wise"};

// Differences between two settings, one a seed, and the interval of their mean.
struct Difference {
  std::vector<double> values;
  Interval interval;

  explicit Difference(std::vector<double> differences, double alpha = kLevel)
      : values(std::move(differences)), interval(interval_of(values, alpha)) {}
  bool is_below() const { return values.size() > 1 && interval.high < 0; }
  bool is_above() const { return values.size() > 1 && interval.low > 0; }
};

// "-0.0312 [-0.0340, -0.0284], 8 seeds"
std::string show(const Difference& difference) {
  const auto& [mean, low, high] = difference.interval;
  const size_t count = difference.values.size();
  if (count == 0) return "not measured";
  if (count == 1) return format("%+.4f, 1 seed, no interval", mean);
  return format("%+.4f [%+.4f, %+.4f], %zu seeds", mean, low, high, count);
}

// What the study itself, without variants, says about two settings.
Difference between(
    const Analysis& analysis, const std::string& a, const std::string& b, double alpha = kLevel) {
  const auto *first = analysis.main.find(a), *second = analysis.main.find(b);
  if (first == nullptr || second == nullptr) return Difference({});
  return Difference(differences_of(first->losses, second->losses), alpha);
}

// The mean over pairs of settings, for each seed that all of them have.
Difference mean_between(
    const Analysis& analysis, const std::vector<std::pair<std::string, std::string>>& pairs) {
  std::map<int64_t, std::vector<double>> by_seed;
  for (const auto& [a, b] : pairs) {
    const auto *first = analysis.main.find(a), *second = analysis.main.find(b);
    if (first == nullptr || second == nullptr) return Difference({});
    for (const auto& [seed, loss] : first->losses) {
      const auto other = second->losses.find(seed);
      if (other != second->losses.end()) by_seed[seed].push_back(loss - other->second);
    }
  }
  std::vector<double> means;
  for (const auto& [seed, values] : by_seed) {
    if (values.size() == pairs.size()) means.push_back(summarize(values).mean);
  }
  return Difference(std::move(means));
}

std::string grouped(const char* row, int g, const char* rule) {
  return g == 1 ? c10::str(row, "-1") : c10::str(row, "-", g, "-", rule);
}

// Of Table 1 alone: a study's own settings are not the paper's.
std::vector<std::string> measured_settings(const Analysis& analysis, const std::string& prefix) {
  std::vector<std::string> names;
  for (const auto& setting : table1_settings()) {
    const auto* summary = analysis.main.find(setting.name);
    if (setting.name.rfind(prefix, 0) != 0 || summary == nullptr) continue;
    if (summary->loss.count > 0) names.push_back(setting.name);
  }
  return names;
}

// A training of some length: the study, or a variant that differs in nothing but that.
struct Training {
  std::string variant;
  int64_t steps;
};

std::vector<Training> trainings(const Folder& folder) {
  const auto config = train::configure(folder.study.options);
  std::vector<Training> list = {{"", config.steps}};
  for (const auto& variant : folder.study.variants) {
    auto options = folder.study.options;
    options.insert(options.end(), variant.options.begin(), variant.options.end());
    auto other = train::configure(options);
    const int64_t steps = other.steps;
    other.steps = config.steps;
    other.warmdown = config.warmdown;
    other.validation_interval = config.validation_interval;
    other.checkpoint_interval = config.checkpoint_interval;
    if (steps != config.steps && other == config) list.push_back({variant.name, steps});
  }
  std::stable_sort(
      list.begin(), list.end(), [](const auto& a, const auto& b) { return a.steps < b.steps; });
  return list;
}

// Head-wise less a baseline, early and at the end.
struct EarlyAndLate {
  Interval early, late;
  std::string text;
};

std::optional<EarlyAndLate> early_and_late(
    const Results& results, const Training& training, const char* baseline) {
  const Band band = band_of(differences_of(
      curves_of(results, "head-wise", training.variant),
      curves_of(results, baseline, training.variant)));
  if (band.steps.size() < 3) return std::nullopt;
  // Early: the validation nearest to a tenth of the training; weights are the same at step 0.
  const auto distance = [&](size_t i) { return std::abs(10 * band.steps[i] - training.steps); };
  size_t early = 1;
  for (size_t i = 2; i < band.steps.size(); ++i) early = distance(i) < distance(early) ? i : early;
  const auto at = [&](size_t i) { return Interval{band.mean[i], band.low[i], band.high[i]}; };
  const auto show_at = [&](size_t i) {
    const std::string interval =
        band.count > 1 ? format(" [%+.4f, %+.4f]", band.low[i], band.high[i]) : "";
    return format(
        "%+.4f%s at step %lld", band.mean[i], interval.c_str(),
        static_cast<long long>(band.steps[i]));
  };
  const size_t last = band.steps.size() - 1;
  const auto [from, to] = crossing(band);
  const std::string text = c10::str(
      training.variant.empty() ? "" : training.variant + ": ", "head-wise less ", baseline, ", ",
      band.count, band.count == 1 ? " seed: " : " seeds: ", show_at(early), ", ", show_at(last),
      from < 0 ? "; no crossing" : c10::str("; crossing between steps ", from, " and ", to));
  // Too late for early.
  if (5 * band.steps[early] > training.steps) return EarlyAndLate{{}, at(last), text};
  return EarlyAndLate{at(early), at(last), text};
}

Claim head_wise_early_full_late(const Folder& folder, const Results& results) {
  Claim claim{1, "Head-wise falls faster early, full-matrix is better late", {}, {}};
  for (const auto& training : trainings(folder)) {
    int compared = 0, faster = 0, slower = 0, better = 0, worse = 0;
    for (const char* baseline : kBaselines) {
      const auto found = early_and_late(results, training, baseline);
      if (!found) continue;
      claim.evidence.push_back(found->text);
      if (!std::isfinite(found->late.low)) continue;
      ++compared;
      faster += found->early.high < 0 ? 1 : 0;
      slower += found->early.low > 0 ? 1 : 0;
      better += found->late.high < 0 ? 1 : 0;
      worse += found->late.low > 0 ? 1 : 0;
    }
    if (compared < 2) continue;  // it takes both baselines, with intervals
    claim.verdict = faster == 2 && worse == 2    ? Verdict::kSupported
                    : slower == 2 || better == 2 ? Verdict::kContradicted
                                                 : Verdict::kUndecided;
  }
  if (claim.evidence.empty()) claim.evidence.push_back("not measured");
  claim.evidence.push_back(
      "Supported if, against both baselines, head-wise is below at the validation nearest to a "
      "tenth of the training (a fifth at most) and above at its end; contradicted if it is above "
      "early or below at the end. The longest training with intervals decides");
  return claim;
}

Claim better_with_size(const Analysis& analysis) {
  Claim claim{2, "QK with random groups gets better with g up to 6", {}, {}};
  const double alpha = kLevel / static_cast<double>(std::size(kSizes));
  const auto ends = between(analysis, "qk-6-random", "qk-1", alpha);
  claim.evidence.push_back("g = 6 less g = 1: " + show(ends));
  bool worse_somewhere = false;
  for (size_t i = 1; i < std::size(kSizes); ++i) {
    const auto step = between(
        analysis, grouped("qk", kSizes[i], "random"), grouped("qk", kSizes[i - 1], "random"),
        alpha);
    claim.evidence.push_back(
        c10::str("g = ", kSizes[i], " less g = ", kSizes[i - 1], ": ", show(step)));
    worse_somewhere = worse_somewhere || step.is_above();
  }
  claim.evidence.push_back(
      "Supported if g = 6 is below g = 1 and no step is above zero, contradicted if any of these "
      "is above; intervals hold for all five at once");
  if (ends.is_below()) claim.verdict = Verdict::kSupported;
  if (ends.is_above() || worse_somewhere) claim.verdict = Verdict::kContradicted;
  return claim;
}

Claim random_is_best(const Analysis& analysis) {
  Claim claim{3, "Random beats adjacent and interval at equal g", {}, {}};
  int below = 0, above = 0;
  for (const char* rule : {"adjacent", "interval"}) {
    std::vector<std::pair<std::string, std::string>> pairs;
    for (const int g : {2, 3, 4, 6}) {
      pairs.emplace_back(grouped("qk", g, "random"), grouped("qk", g, rule));
    }
    const auto difference = mean_between(analysis, pairs);
    claim.evidence.push_back(
        c10::str("QK, random less ", rule, ", mean over g = 2, 3, 4, 6: ", show(difference)));
    below += difference.is_below() ? 1 : 0;
    above += difference.is_above() ? 1 : 0;
  }
  claim.evidence.push_back(
      "Supported if both intervals are below zero, contradicted if one is above");
  if (below == 2) claim.verdict = Verdict::kSupported;
  if (above > 0) claim.verdict = Verdict::kContradicted;
  return claim;
}

// Half of what grouping QK gains: less than that counts as no gain. NaN if QK does not gain.
double margin_of(const Analysis& analysis) {
  const auto gain = between(analysis, "qk-6-random", "three-way");
  return gain.is_below() ? -gain.interval.mean / 2 : kUnknown;
}

std::string margin_text(double margin) {
  if (!std::isfinite(margin)) {
    return "minus half of what QK g = 6 random gains on three-way, which is not clearly anything "
           "here";
  }
  return format("-%.4f, half of what QK g = 6 random gains on three-way", margin);
}

Claim no_gain_of_v(const Analysis& analysis) {
  Claim claim{4, "Grouping V gives no consistent gain", {}, {}};
  const auto settings = measured_settings(analysis, "v-");
  if (settings.empty()) {
    claim.evidence.push_back("not measured");
    return claim;
  }
  const double margin = margin_of(analysis);
  for (const std::string base : {"three-way", "packed"}) {
    std::vector<std::pair<std::string, std::string>> pairs;
    int64_t better = 0;
    for (const auto& setting : settings) {
      pairs.emplace_back(setting, base);
      better += between(analysis, setting, base).interval.mean < 0 ? 1 : 0;
    }
    const auto difference = mean_between(analysis, pairs);
    claim.evidence.push_back(
        c10::str(
            "mean of ", settings.size(), " of 9 settings less ", base, ": ", show(difference),
            "; lower: ", better));
    if (base != "three-way") continue;  // packed differs in more than V
    if (2 * settings.size() < kVSettings) continue;
    if (difference.values.size() > 1 && difference.interval.low > -margin) {
      claim.verdict = Verdict::kSupported;
    }
    if (difference.is_below()) claim.verdict = Verdict::kContradicted;
  }
  claim.evidence.push_back(
      "Decided by the mean less three-way, with at least half of the settings: contradicted if its "
      "interval is below zero, supported if it is above " +
      margin_text(margin));
  return claim;
}

Claim fixed_qk_adds_nothing(const Analysis& analysis) {
  Claim claim{5, "Fixed-QK+V does not beat QK alone", {}, {}};
  const auto settings = measured_settings(analysis, "fixed-qk-v-");
  const double margin = margin_of(analysis), alpha = kLevel / static_cast<double>(settings.size());
  bool any_below = false, all_within = !settings.empty();
  for (const auto& setting : settings) {
    const auto difference = between(analysis, setting, "qk-6-random", alpha);
    claim.evidence.push_back(c10::str(setting, " less qk-6-random: ", show(difference)));
    any_below = any_below || difference.is_below();
    all_within = all_within && difference.values.size() > 1 && difference.interval.low > -margin;
  }
  if (settings.empty()) {
    claim.evidence.push_back("not measured");
    return claim;
  }
  all_within = all_within && 2 * settings.size() >= kVSettings;
  claim.evidence.push_back(
      "Contradicted if one is below zero, supported if all are above " + margin_text(margin) +
      "; intervals hold for all of them at once");
  if (all_within) claim.verdict = Verdict::kSupported;
  if (any_below) claim.verdict = Verdict::kContradicted;
  return claim;
}

Claim best_beats_both(const Analysis& analysis) {
  Claim claim{6, "The best grouping beats both Full-QKV and head-wise", {}, {}};
  std::vector<std::string> groupings;
  for (const char* row : {"qk-", "v-", "fixed-qk-v-"}) {
    const auto names = measured_settings(analysis, row);
    groupings.insert(groupings.end(), names.begin(), names.end());
  }
  // The best of many is not just any: intervals are those for all of them at once.
  const double alpha = kLevel / static_cast<double>(groupings.size());
  // Shown is the lowest of those that beat all three; without one, of those with intervals; without one, of all.
  struct Rank {
    bool misses, guesses;
    double mean;
    auto operator<=>(const Rank&) const = default;
  } first{true, true, INFINITY};
  bool all_lose = !groupings.empty();
  std::string best;
  for (const auto& name : groupings) {
    Rank rank{false, false, between(analysis, name, "packed").interval.mean};
    bool loses = false;
    for (const char* other : kWholeOrSingle) {
      const auto difference = between(analysis, name, other, alpha);
      rank.misses = rank.misses || !difference.is_below();
      rank.guesses = rank.guesses || difference.values.size() < 2;
      loses = loses || difference.is_above();
    }
    all_lose = all_lose && loses;
    if (rank < first) {
      first = rank;
      best = name;
    }
  }
  if (best.empty()) {
    claim.evidence.push_back("not measured");
    return claim;
  }
  for (const char* other : kWholeOrSingle) {
    claim.evidence.push_back(
        c10::str(best, " less ", other, ": ", show(between(analysis, best, other, alpha))));
  }
  const char* lowest = !first.misses    ? " is the lowest that is below all three, of "
                       : !first.guesses ? " is the lowest with intervals, of "
                                        : " is the lowest, of ";
  claim.evidence.push_back(
      c10::str(
          best, lowest, groupings.size(),
          " groupings by the difference to packed. Supported if some grouping is below all three, "
          "contradicted if each is above one of them; intervals hold for all groupings at once"));
  if (!first.misses) claim.verdict = Verdict::kSupported;
  if (all_lose) claim.verdict = Verdict::kContradicted;
  return claim;
}

// The mean over the second half of a series.
double late_mean(const std::vector<double>& values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  return summarize({middle, values.end()}).mean;
}

const DiagnosticSeries* find_series(
    const RunResult& run, const std::string& of, const std::string& grouping) {
  for (const auto& series : run.diagnostics) {
    if (series.of == of && series.grouping == grouping) return &series;
  }
  return nullptr;
}

constexpr const char* kNoDiagnostics = "not measured: give the study a variant with diagnose-every";

Claim near_full_rank(const Results& results) {
  Claim claim{
      7,
      "Gradients and momentum are near full row rank, and the groups' ranks add up to the whole's",
      {},
      {}};
  constexpr double kNear = 0.95;
  int measured = 0, near = 0;
  for (const auto& run : results.runs) {
    for (const char* of : {"gradient", "momentum"}) {
      const auto *whole = find_series(run, of, "three-way"), *heads = find_series(run, of, "1");
      if (whole == nullptr || heads == nullptr) continue;
      const double full = late_mean(whole->rank_ratio), sum = late_mean(heads->rank_ratio);
      claim.evidence.push_back(format(
          "%s, %s: rank by rows above 0.01 σ₁ %.3f whole, %.3f as sum of heads; above machine "
          "precision %.3f and %.3f",
          run.run.name.c_str(), of, full, sum, late_mean(whole->rank_ratio_machine),
          late_mean(heads->rank_ratio_machine)));
      ++measured;
      near += full > kNear && sum / full < 1 / kNear ? 1 : 0;
    }
  }
  claim.evidence.push_back(
      measured > 0 ? "Means over Q and K of all layers in the second half of training. Supported "
                     "if all are above 0.95 at 0.01 σ₁ and the sums within 5%, contradicted if "
                     "none is"
                   : kNoDiagnostics);
  if (measured > 0 && near == measured) claim.verdict = Verdict::kSupported;
  if (measured > 0 && near == 0) claim.verdict = Verdict::kContradicted;
  return claim;
}

Claim larger_norms(const Results& results) {
  Claim claim{
      8, "Head-wise updates have a larger Σ‖Oᵢ‖² than full ones, both below the ideal", {}, {}};
  constexpr double kMost = 0.75;
  int measured = 0, larger = 0, smaller = 0, below = 0;
  for (const auto& run : results.runs) {
    const auto* whole = find_series(run, "momentum", "three-way");
    const auto* heads = find_series(run, "momentum", "1");
    if (whole == nullptr || heads == nullptr) continue;
    const double full = late_mean(whole->squared_norm_ratio);
    const double split = late_mean(heads->squared_norm_ratio);
    claim.evidence.push_back(format(
        "%s, momentum: ‖O‖² by its ideal %.3f whole, %.3f head-wise; head-wise larger in %.0f%% "
        "of all matrices and steps",
        run.run.name.c_str(), full, split, 100 * heads->larger_norms));
    ++measured;
    larger += heads->larger_norms >= kMost ? 1 : 0;
    smaller += heads->larger_norms <= 1 - kMost ? 1 : 0;
    below += full < 1 && split < 1 ? 1 : 0;
  }
  claim.evidence.push_back(
      measured > 0
          ? "Supported if it is larger in three quarters of the cases and both are below 1, "
            "contradicted if it is smaller in three quarters or one is not below 1"
          : kNoDiagnostics);
  if (measured == 0) return claim;
  if (larger == measured && below == measured) claim.verdict = Verdict::kSupported;
  if (smaller == measured || below == 0) claim.verdict = Verdict::kContradicted;
  return claim;
}

}  // namespace

std::string to_string(Verdict verdict) {
  switch (verdict) {
    case Verdict::kSupported:
      return "supported";
    case Verdict::kContradicted:
      return "contradicted";
    default:
      return "undecided";
  }
}

std::pair<int64_t, int64_t> crossing(const Band& difference) {
  const auto& [count, steps, mean, low, high] = difference;
  if (mean.empty() || mean.back() <= 0) return {-1, -1};
  for (size_t i = mean.size() - 1; i > 0; --i) {
    if (mean[i - 1] < 0) return {steps[i - 1], steps[i]};
  }
  return {-1, -1};
}

std::vector<std::string> conclusions(const Analysis& analysis) {
  const SettingSummary* best = nullptr;
  double lowest = INFINITY;
  for (const auto& setting : analysis.main.settings) {
    if (setting.exploratory) continue;
    const double mean =
        setting.name == "packed" ? 0 : between(analysis, setting.name, "packed").interval.mean;
    if (!(mean < lowest)) continue;
    lowest = mean;
    best = &setting;
  }
  if (best == nullptr) {
    return {format(
        "No setting has %lld seeds yet: all that follows is exploratory.",
        static_cast<long long>(kEnoughSeeds))};
  }
  std::vector<std::string> lines = {c10::str(
      "Of the settings with enough seeds, ", best->name,
      " is lowest: ", format("%.4f, ", best->loss.mean), best->loss.count, " seeds.")};
  std::string alike;
  for (const auto& setting : analysis.main.settings) {
    if (setting.exploratory || &setting == best) continue;
    const auto difference = between(analysis, best->name, setting.name);
    if (difference.is_below()) {
      lines.push_back(c10::str(best->name, " less ", setting.name, ": ", show(difference), "."));
    } else {
      alike += (alike.empty() ? "" : ", ") + setting.name;
    }
  }
  if (!alike.empty()) lines.push_back("It cannot be told from " + alike + " at 95%.");
  return lines;
}

std::vector<Claim> check_claims(
    const Folder& folder, const Results& results, const Analysis& analysis) {
  return {
      head_wise_early_full_late(folder, results),
      better_with_size(analysis),
      random_is_best(analysis),
      no_gain_of_v(analysis),
      fixed_qk_adds_nothing(analysis),
      best_beats_both(analysis),
      near_full_rank(results),
      larger_norms(results)};
}

}  // namespace study
