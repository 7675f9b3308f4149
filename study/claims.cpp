#include "study/claims.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <tuple>

#include "study/settings.h"
#include "study/text.h"

namespace study {
namespace {

constexpr double kLevel = 0.05;
constexpr int kSizes[] = {1, 2, 3, 4, 6};
constexpr const char* kWholeOrSingle[] = {"packed", "three-way", "head-wise"};
constexpr const char* kRows[] = {"qk-", "v-", "fixed-qk-v-"};

// A difference between settings, one value per seed, and the interval of its mean.
struct Difference {
  std::vector<double> values;
  Interval interval;
  bool whole = true;  // no run failed

  explicit Difference(std::vector<double> differences, double alpha = kLevel)
      : values(std::move(differences)), interval(interval_of(values, alpha)) {}
  bool is_enough() const { return whole && values.size() >= static_cast<size_t>(kEnoughSeeds); }
  bool is_tested() const { return values.size() > 1; }
  bool is_below() const { return is_tested() && interval.high < 0; }
  bool is_above() const { return is_tested() && interval.low > 0; }
};

// "-0.0312 [-0.0340, -0.0284], 8 seeds"
std::string show(const Difference& difference) {
  const auto& [mean, low, high] = difference.interval;
  const size_t count = difference.values.size();
  if (count == 0) return "not measured";
  const char* rest = difference.whole ? "" : ", others failed";
  if (count == 1) return format("%+.4f, 1 seed%s, no interval", mean, rest);
  return format("%+.4f [%+.4f, %+.4f], %zu seeds%s", mean, low, high, count, rest);
}

// Weights and names of settings.
using Terms = std::vector<std::pair<double, std::string>>;

// A weighted sum of losses, for each seed that all the settings have.
Difference sum_of(const VariantSummary& summary, const Terms& terms, double alpha = kLevel) {
  std::map<int64_t, std::pair<size_t, double>> by_seed;
  bool whole = true;
  for (const auto& [weight, name] : terms) {
    const auto* setting = summary.find(name);
    if (setting == nullptr) return Difference({});
    whole = whole && setting->failed == 0;
    for (const auto& [seed, loss] : setting->losses) {
      ++by_seed[seed].first;
      by_seed[seed].second += weight * loss;
    }
  }
  std::vector<double> sums;
  for (const auto& [seed, counted] : by_seed) {
    if (counted.first == terms.size()) sums.push_back(counted.second);
  }
  Difference sum(std::move(sums), alpha);
  sum.whole = whole;
  return sum;
}

Difference between(
    const VariantSummary& summary, const std::string& a, const std::string& b,
    double alpha = kLevel) {
  return sum_of(summary, {{1, a}, {-1, b}}, alpha);
}

// Sets a verdict that rests on these differences. It is exploratory if one of them has too few seeds.
void decide(Claim& claim, Verdict verdict, const std::vector<Difference>& by) {
  claim.verdict = verdict;
  claim.exploratory = !std::all_of(by.begin(), by.end(), std::mem_fn(&Difference::is_enough));
}

std::string grouped(const char* row, int g, const char* rule) {
  return g == 1 ? c10::str(row, "-1") : c10::str(row, "-", g, "-", rule);
}

// Settings of Table 1 with results. A study's own settings are excluded: they are not the paper's.
std::vector<std::string> measured_settings(const Analysis& analysis, const std::string& prefix) {
  std::vector<std::string> names;
  for (const auto& setting : table1_settings()) {
    const auto* summary = analysis.main.find(setting.name);
    if (setting.name.rfind(prefix, 0) != 0 || summary == nullptr) continue;
    if (summary->loss.count > 0) names.push_back(setting.name);
  }
  return names;
}

size_t settings_of_row(const std::string& prefix) {
  const auto& all = table1_settings();
  return static_cast<size_t>(std::count_if(all.begin(), all.end(), [&](const auto& setting) {
    return setting.name.rfind(prefix, 0) == 0;
  }));
}

// A training of some length: the study's, or that of a variant that differs only in length.
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

std::string words_before(const Training& training) {
  return training.variant.empty() ? "" : training.variant + ": ";
}

const VariantSummary& summary_of(const Analysis& analysis, const Training& training) {
  for (const auto& variant : analysis.variants) {
    if (variant.name == training.variant) return variant;
  }
  return analysis.main;
}

// Head-wise minus a baseline, early and at the end.
struct EarlyAndLate {
  Interval early, late;
  bool enough;
  std::string text;
};

std::optional<EarlyAndLate> early_and_late(
    const Results& results, const Training& training, const char* baseline) {
  const Band band = band_of(differences_of(
      curves_of(results, "head-wise", training.variant),
      curves_of(results, baseline, training.variant)));
  if (band.steps.size() < 3) return std::nullopt;
  // Early is the validation nearest to a tenth of the training. Step 0 is excluded: weights are still the same.
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
  const bool whole = failures_of(results, "head-wise", training.variant) == 0 &&
                     failures_of(results, baseline, training.variant) == 0;
  const bool enough = whole && band.count >= kEnoughSeeds;
  const std::string text = c10::str(
      words_before(training), "head-wise minus ", baseline, ", ", band.count,
      band.count == 1 ? " seed" : " seeds", whole ? ": " : ", others failed: ", show_at(early),
      ", ", show_at(last),
      from < 0 ? std::string("; no crossing to above zero")
               : c10::str("; crossing to above zero between steps ", from, " and ", to));
  // A validation after the first fifth is not early.
  const bool is_early = 5 * band.steps[early] <= training.steps;
  return EarlyAndLate{is_early ? at(early) : Interval{}, at(last), enough, text};
}

Claim head_wise_early_full_late(const Folder& folder, const Results& results) {
  Claim claim{1, "Head-wise falls faster early, full-matrix is better late"};
  claim.exploratory = true;
  for (const auto& training : trainings(folder)) {
    int compared = 0, faster = 0, slower = 0, better = 0, worse = 0;
    bool enough = true;
    for (const char* baseline : kBaselines) {
      const auto found = early_and_late(results, training, baseline);
      if (!found) continue;
      claim.evidence.push_back(found->text);
      if (!std::isfinite(found->late.low)) continue;
      ++compared;
      enough = enough && found->enough;
      faster += found->early.high < 0 ? 1 : 0;
      slower += found->early.low > 0 ? 1 : 0;
      better += found->late.high < 0 ? 1 : 0;
      worse += found->late.low > 0 ? 1 : 0;
    }
    if (compared < 2) continue;  // it takes both baselines, with intervals
    claim.exploratory = !enough;
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

Claim better_with_size(const Folder& folder, const Analysis& analysis) {
  Claim claim{2, "QK with random groups gets better with g up to 6"};
  const double alpha = kLevel / static_cast<double>(std::size(kSizes));
  auto ends = between(analysis.main, "qk-6-random", "qk-1", alpha);
  for (const auto& training : trainings(folder)) {
    const auto found = between(summary_of(analysis, training), "qk-6-random", "qk-1", alpha);
    if (found.values.empty() && !training.variant.empty()) continue;
    claim.evidence.push_back(words_before(training) + "g = 6 minus g = 1: " + show(found));
    if (found.is_tested()) ends = found;
  }
  std::vector<Difference> all = {ends};
  for (size_t i = 1; i < std::size(kSizes); ++i) {
    const auto step = between(
        analysis.main, grouped("qk", kSizes[i], "random"), grouped("qk", kSizes[i - 1], "random"),
        alpha);
    claim.evidence.push_back(
        c10::str("g = ", kSizes[i], " minus g = ", kSizes[i - 1], ": ", show(step)));
    all.push_back(step);
  }
  claim.evidence.push_back(
      "Supported if g = 6 is below g = 1, all steps have intervals and none is above zero; "
      "contradicted if any of these is above; intervals hold for all five at once. For g = 6 "
      "against g = 1 the longest training with intervals decides");
  const auto above = std::find_if(all.begin(), all.end(), std::mem_fn(&Difference::is_above));
  if (above != all.end()) {
    decide(claim, Verdict::kContradicted, {*above});
  } else if (
      ends.is_below() && std::all_of(all.begin(), all.end(), std::mem_fn(&Difference::is_tested))) {
    decide(claim, Verdict::kSupported, all);
  }
  return claim;
}

Claim random_is_best(const Analysis& analysis) {
  Claim claim{3, "Random beats adjacent and interval at equal g"};
  std::vector<Difference> both;
  for (const char* rule : {"adjacent", "interval"}) {
    Terms terms;
    for (const int g : {2, 3, 4, 6}) {
      terms.emplace_back(0.25, grouped("qk", g, "random"));
      terms.emplace_back(-0.25, grouped("qk", g, rule));
    }
    both.push_back(sum_of(analysis.main, terms, kLevel / 2));
    claim.evidence.push_back(
        c10::str("QK, random minus ", rule, ", mean over g = 2, 3, 4, 6: ", show(both.back())));
  }
  claim.evidence.push_back(
      "Supported if both are below zero, contradicted if one is above; intervals hold for both at "
      "once");
  const auto above = std::find_if(both.begin(), both.end(), std::mem_fn(&Difference::is_above));
  if (above != both.end()) {
    decide(claim, Verdict::kContradicted, {*above});
  } else if (both[0].is_below() && both[1].is_below()) {
    decide(claim, Verdict::kSupported, both);
  }
  return claim;
}

// The terms plus half of what grouping QK gains on three-way. Above zero, the terms gain less than half of that.
Terms with_half_the_gain(Terms terms) {
  terms.emplace_back(-0.5, "qk-6-random");
  terms.emplace_back(0.5, "three-way");
  return terms;
}

Claim no_gain_of_v(const Analysis& analysis) {
  Claim claim{4, "Grouping V gives no consistent gain"};
  const auto settings = measured_settings(analysis, "v-");
  if (settings.empty()) {
    claim.evidence.push_back("not measured");
    return claim;
  }
  const auto mean_less = [&](const char* base) {
    Terms terms = {{-1, base}};
    for (const auto& setting : settings) {
      terms.emplace_back(1 / static_cast<double>(settings.size()), setting);
    }
    return terms;
  };
  for (const char* base : {"three-way", "packed"}) {
    const auto lower = std::count_if(settings.begin(), settings.end(), [&](const auto& setting) {
      return between(analysis.main, setting, base).interval.mean < 0;
    });
    claim.evidence.push_back(
        c10::str(
            "mean of ", settings.size(), " of ", settings_of_row("v-"), " settings minus ", base,
            ": ", show(sum_of(analysis.main, mean_less(base))), "; lower: ", lower));
  }
  // Packed differs in more than V.
  const auto difference = sum_of(analysis.main, mean_less("three-way"));
  const auto gain = between(analysis.main, "qk-6-random", "three-way");
  const auto margin = sum_of(analysis.main, with_half_the_gain(mean_less("three-way")));
  claim.evidence.push_back(
      "the mean minus three-way, plus half of what QK g = 6 random gains on it: " + show(margin) +
      "; if above zero, V gains less than half as much");
  claim.evidence.push_back(
      "Decided by the mean minus three-way if at least half of the settings are measured: "
      "contradicted if it is below zero; supported if it is above zero, or above zero with half of "
      "QK's gain added, provided QK gains");
  if (2 * settings.size() < settings_of_row("v-")) return claim;
  if (difference.is_below()) {
    decide(claim, Verdict::kContradicted, {difference});
  } else if (difference.is_above()) {
    decide(claim, Verdict::kSupported, {difference});
  } else if (gain.is_below() && margin.is_above()) {
    decide(claim, Verdict::kSupported, {margin});
  }
  return claim;
}

Claim fixed_qk_adds_nothing(const Analysis& analysis) {
  Claim claim{5, "Fixed-QK+V does not beat QK alone"};
  const auto settings = measured_settings(analysis, "fixed-qk-v-");
  if (settings.empty()) {
    claim.evidence.push_back("not measured");
    return claim;
  }
  const double alpha = kLevel / static_cast<double>(settings.size());
  const bool gains = between(analysis.main, "qk-6-random", "three-way").is_below();
  std::vector<Difference> below, within;
  for (const auto& setting : settings) {
    const Terms terms = {{1, setting}, {-1, "qk-6-random"}};
    const auto difference = sum_of(analysis.main, terms, alpha);
    const auto margin = sum_of(analysis.main, with_half_the_gain(terms), alpha);
    claim.evidence.push_back(
        c10::str(
            setting, " minus qk-6-random: ", show(difference),
            "; plus half of what qk-6-random gains on three-way: ", show(margin)));
    if (difference.is_below()) below.push_back(difference);
    if (difference.is_above() || (gains && margin.is_above())) within.push_back(difference);
  }
  claim.evidence.push_back(
      "Contradicted if one is below zero; supported if at least half of the settings are measured "
      "and all are above zero, or above zero with half of what qk-6-random gains on three-way "
      "added, provided it gains; intervals hold for all settings at once");
  if (!below.empty()) {
    decide(claim, Verdict::kContradicted, {below.front()});
  } else if (
      within.size() == settings.size() && 2 * settings.size() >= settings_of_row("fixed-qk-v-")) {
    decide(claim, Verdict::kSupported, within);
  }
  return claim;
}

// A grouping against whole matrices and single heads.
struct Rival {
  std::string name;
  std::vector<Difference> less;  // its loss minus each of kWholeOrSingle
  bool loses = false;            // is above one of them

  bool is_tested() const {
    return std::all_of(less.begin(), less.end(), std::mem_fn(&Difference::is_tested));
  }
  bool wins() const {
    return std::all_of(less.begin(), less.end(), std::mem_fn(&Difference::is_below));
  }
  // Sort key: winners first, then those with intervals, then by loss.
  std::tuple<bool, bool, double> rank() const {
    return {!wins(), !is_tested(), less.front().interval.mean};
  }
};

Claim best_beats_both(const Analysis& analysis) {
  Claim claim{6, "The best grouping beats both Full-QKV and head-wise"};
  std::vector<std::string> groupings;
  size_t planned = 0;
  for (const char* row : kRows) {
    const auto names = measured_settings(analysis, row);
    groupings.insert(groupings.end(), names.begin(), names.end());
    planned += settings_of_row(row);
  }
  // The best is selected from many, so intervals hold for all of them at once.
  const double alpha = kLevel / static_cast<double>(groupings.size());
  std::vector<Rival> rivals;
  for (const auto& name : groupings) {
    Rival rival{name, {}};
    for (const char* other : kWholeOrSingle) {
      rival.less.push_back(between(analysis.main, name, other, alpha));
      const double third = alpha / std::size(kWholeOrSingle);  // it has three ways to lose
      rival.loses = rival.loses || between(analysis.main, name, other, third).is_above();
    }
    if (!rival.less.front().values.empty()) rivals.push_back(std::move(rival));
  }
  if (rivals.empty()) {
    claim.evidence.push_back("not measured");
    return claim;
  }
  const auto& best = *std::min_element(
      rivals.begin(), rivals.end(),
      [](const auto& a, const auto& b) { return a.rank() < b.rank(); });
  for (size_t i = 0; i < best.less.size(); ++i) {
    claim.evidence.push_back(
        c10::str(best.name, " minus ", kWholeOrSingle[i], ": ", show(best.less[i])));
  }
  claim.evidence.push_back(
      c10::str(
          best.name,
          best.wins()        ? " is the lowest that is below all three"
          : best.is_tested() ? " is the lowest with intervals"
                             : " is the lowest",
          ", of ", groupings.size(),
          " groupings by the difference to packed. Supported if some grouping is below all three; "
          "contradicted if at least half of the ",
          planned,
          " are measured and each is above one of the three; intervals hold for all groupings at "
          "once"));
  const bool all_lose =
      std::all_of(rivals.begin(), rivals.end(), [](const auto& rival) { return rival.loses; });
  if (best.wins()) {
    decide(claim, Verdict::kSupported, best.less);
  } else if (all_lose && 2 * rivals.size() >= planned) {
    std::vector<Difference> all;
    for (const auto& rival : rivals) all.insert(all.end(), rival.less.begin(), rival.less.end());
    decide(claim, Verdict::kContradicted, all);
  }
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

constexpr const char* kNoDiagnostics =
    "not measured: add a variant with diagnose-every to the study; if it sets diagnose-groups, "
    "include 1";

// Decides by the number of measured runs that agree (`yes`) and disagree (`no`); all must be on one side.
void decide(Claim& claim, int64_t measured, int64_t yes, int64_t no) {
  claim.exploratory = measured < kEnoughSeeds;
  if (measured > 0 && yes == measured) claim.verdict = Verdict::kSupported;
  if (measured > 0 && no == measured) claim.verdict = Verdict::kContradicted;
}

Claim near_full_rank(const Results& results) {
  Claim claim{
      7,
      "Gradients and momentum are near full row rank, and the groups' ranks add up to the whole's"};
  constexpr double kNear = 0.05;
  const auto is_near = [](double whole, double sum) {
    return whole > 1 - kNear && std::abs(sum / whole - 1) < kNear;
  };
  int64_t measured = 0, yes = 0, no = 0;
  for (const auto& run : results.runs) {
    int near = 0, found = 0;
    for (const char* of : {"gradient", "momentum"}) {
      const auto *whole = find_series(run, of, "three-way"), *heads = find_series(run, of, "1");
      if (whole == nullptr || heads == nullptr) continue;
      const double full = late_mean(whole->rank_ratio), sum = late_mean(heads->rank_ratio);
      const double full_machine = late_mean(whole->rank_ratio_machine);
      const double sum_machine = late_mean(heads->rank_ratio_machine);
      claim.evidence.push_back(format(
          "%s, %s: rank / rows above 0.01 σ₁: %.3f whole, %.3f summed over heads; above machine "
          "precision: %.3f and %.3f",
          run.run.name.c_str(), of, full, sum, full_machine, sum_machine));
      found += 2;
      near += (is_near(full, sum) ? 1 : 0) + (is_near(full_machine, sum_machine) ? 1 : 0);
    }
    if (found == 0) continue;
    ++measured;
    yes += near == found ? 1 : 0;
    no += near == 0 ? 1 : 0;
  }
  claim.evidence.push_back(
      measured > 0 ? "Means over Q and K of all layers in the second half of training. Supported "
                     "if all are above 0.95 and the sums within 5%, with both tolerances (the "
                     "paper names none); contradicted if with neither"
                   : kNoDiagnostics);
  decide(claim, measured, yes, no);
  return claim;
}

Claim larger_norms(const Results& results) {
  Claim claim{8, "Head-wise updates have a larger Σ‖Oᵢ‖² than full ones, both below the ideal"};
  constexpr double kMost = 0.75;
  int64_t measured = 0, yes = 0, no = 0;
  for (const auto& run : results.runs) {
    const auto* whole = find_series(run, "momentum", "three-way");
    const auto* heads = find_series(run, "momentum", "1");
    if (whole == nullptr || heads == nullptr) continue;
    const double full = late_mean(whole->squared_norm_ratio);
    const double split = late_mean(heads->squared_norm_ratio);
    claim.evidence.push_back(format(
        "%s, momentum: ‖O‖² / ideal: %.3f whole, %.3f head-wise in the second half of "
        "training; head-wise larger in %.0f%% of all matrices and steps",
        run.run.name.c_str(), full, split, 100 * heads->larger_norms));
    const bool below = full < 1 && split < 1;
    ++measured;
    yes += below && heads->larger_norms >= kMost ? 1 : 0;
    no += !below || heads->larger_norms <= 1 - kMost ? 1 : 0;
  }
  claim.evidence.push_back(
      measured > 0 ? "Supported if in every run it is larger in three quarters of the cases and "
                     "both are below 1; contradicted if in every run it is smaller in three "
                     "quarters or one is not below 1"
                   : kNoDiagnostics);
  decide(claim, measured, yes, no);
  return claim;
}

// The order of all settings on the seeds that all have, or "" if all have the same seeds. With different seeds,
// neither means nor differences to a baseline can be compared across settings.
std::string order_of_all(const Analysis& analysis) {
  constexpr size_t kShown = 4;
  std::vector<std::pair<double, std::string>> order;
  std::vector<std::map<int64_t, double>> losses;
  for (const auto& setting : analysis.main.settings) {
    if (!setting.losses.empty()) losses.push_back(setting.losses);
  }
  const auto seeds = common_seeds(losses);
  const bool uneven = std::any_of(losses.begin(), losses.end(), [&](const auto& of_one) {
    return of_one.size() > seeds.size();
  });
  if (!uneven || seeds.empty()) return "";
  for (const auto& setting : analysis.main.settings) {
    if (setting.losses.empty()) continue;
    double mean = 0;
    for (const int64_t seed : seeds) {
      mean += setting.losses.at(seed) / static_cast<double>(seeds.size());
    }
    order.emplace_back(mean, setting.name);
  }
  std::sort(order.begin(), order.end());
  std::string list;
  for (size_t i = 0; i < std::min(order.size(), kShown); ++i) {
    list += i == 0 ? order[i].second
                   : ", " + order[i].second + format(" (%+.4f)", order[i].first - order[0].first);
  }
  return c10::str(
      "On the ", seeds.size(), seeds.size() == 1 ? " seed" : " seeds", " that all ", order.size(),
      " settings have, the lowest are ", list, ": exploratory.");
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

std::string words_of(const Claim& claim) {
  const bool marked = claim.exploratory && claim.verdict != Verdict::kUndecided;
  return to_string(claim.verdict) + (marked ? " (exploratory)" : "");
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
  constexpr size_t kShown = 6;
  std::vector<const SettingSummary*> settings;
  for (const auto& setting : analysis.main.settings) {
    if (!setting.exploratory) settings.push_back(&setting);
  }
  if (settings.empty()) {
    return {format(
        "No setting has %lld seeds yet: all that follows is exploratory.",
        static_cast<long long>(kEnoughSeeds))};
  }
  // Seeds differ more than settings do, so the lowest is found by differences to a common reference.
  const std::string& reference = settings.front()->name;
  const auto mean = [&](const SettingSummary* setting) {
    return between(analysis.main, setting->name, reference).interval.mean;
  };
  const auto* best = *std::min_element(
      settings.begin(), settings.end(),
      [&](const auto* a, const auto* b) { return mean(a) < mean(b); });
  std::vector<std::string> lines = {c10::str(
      "Of the ", settings.size(), " settings with enough seeds, ", best->name, " (", best->title,
      ") is lowest: ", format("%.4f, ", best->loss.mean), best->loss.count, " seeds.")};
  // Any setting could have been the lowest, so intervals hold for all pairs at once.
  const auto count = static_cast<double>(settings.size());
  const double alpha = kLevel / std::max(1.0, count * (count - 1) / 2);
  std::vector<std::string> apart, alike;
  for (const auto* setting : settings) {
    if (setting == best) continue;
    const auto difference = between(analysis.main, best->name, setting->name, alpha);
    if (difference.is_below()) {
      apart.push_back(c10::str(best->name, " minus ", setting->name, ": ", show(difference), "."));
    } else {
      alike.push_back(setting->name);
    }
  }
  lines.insert(
      lines.end(), apart.begin(),
      apart.begin() + static_cast<std::ptrdiff_t>(std::min(apart.size(), kShown)));
  if (apart.size() > kShown) {
    lines.push_back(c10::str("It is below ", apart.size() - kShown, " more."));
  }
  if (!alike.empty()) {
    std::string names;
    for (size_t i = 0; i < std::min(alike.size(), kShown); ++i) {
      names += (names.empty() ? "" : ", ") + alike[i];
    }
    if (alike.size() > kShown) names += c10::str(" and ", alike.size() - kShown, " more");
    lines.push_back("It cannot be distinguished from " + names + ".");
  }
  if (settings.size() > 1) lines.push_back("These 95% intervals hold for all pairs at once.");
  for (const auto& setting : analysis.main.settings) {
    if (setting.failed == 0 || setting.loss.count < kEnoughSeeds) continue;
    lines.push_back(
        c10::str(
            setting.name, " is left out because ", setting.failed,
            " of its runs failed: the remaining ones may be the lucky ones."));
  }
  if (auto order = order_of_all(analysis); !order.empty()) lines.push_back(std::move(order));
  return lines;
}

std::vector<Claim> check_claims(
    const Folder& folder, const Results& results, const Analysis& analysis) {
  return {
      head_wise_early_full_late(folder, results),
      better_with_size(folder, analysis),
      random_is_best(analysis),
      no_gain_of_v(analysis),
      fixed_qk_adds_nothing(analysis),
      best_beats_both(analysis),
      near_full_rank(results),
      larger_norms(results)};
}

}  // namespace study
