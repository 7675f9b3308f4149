#include "study/claims.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace study {
namespace {

using Losses = std::map<int64_t, double>;

template <typename... Values>
std::string format(const char* pattern, Values... values) {
  char text[512];
  std::snprintf(text, sizeof text, pattern, values...);
  return text;
}

// "-0.0312 [-0.0340, -0.0284], 8 seeds"
std::string show(const Interval& interval, size_t count, const char* unit = "seeds") {
  if (count == 0) return "not measured";
  if (count == 1) return format("%+.4f, 1 seed, no interval", interval.mean);
  return format(
      "%+.4f [%+.4f, %+.4f], %zu %s", interval.mean, interval.low, interval.high, count, unit);
}

// Below zero, above zero, or neither.
int side_of(const Interval& interval) {
  if (interval.high < 0) return -1;
  return interval.low > 0 ? 1 : 0;
}

// What the claims are checked on.
struct Evidence {
  const Results& results;
  const Analysis& analysis;

  Losses losses(const std::string& setting) const { return losses_of(results, setting); }

  // a less b for each seed that both have.
  std::vector<double> differences(const std::string& a, const std::string& b) const {
    std::vector<double> list;
    const Losses base = losses(b);
    for (const auto& [seed, loss] : losses(a)) {
      if (base.count(seed) == 1) list.push_back(loss - base.at(seed));
    }
    return list;
  }

  // The mean over settings less the base, for each seed that all have.
  std::vector<double> mean_differences(
      const std::vector<std::string>& settings, const std::string& base) const {
    std::vector<double> list;
    for (const auto& [seed, loss] : losses(base)) {
      double sum = 0;
      size_t found = 0;
      for (const auto& setting : settings) {
        const Losses own = losses(setting);
        if (own.count(seed) == 0) continue;
        sum += own.at(seed) - loss;
        ++found;
      }
      if (found == settings.size() && found > 0) list.push_back(sum / static_cast<double>(found));
    }
    return list;
  }
};

constexpr int kSizes[] = {1, 2, 3, 4, 6};

std::string grouped(const char* row, int g, const char* rule) {
  return g == 1 ? c10::str(row, "-1") : c10::str(row, "-", g, "-", rule);
}

std::vector<std::string> settings_with(const Analysis& analysis, const std::string& prefix) {
  std::vector<std::string> names;
  for (const auto& setting : analysis.main.settings) {
    if (setting.name.rfind(prefix, 0) == 0 && setting.loss.count > 0) names.push_back(setting.name);
  }
  return names;
}

std::string title(const char* baseline) { return c10::str(baseline, " Full-QKV"); }

// The study, and the variants that train for longer or shorter than it.
Claim early_and_late(const Folder& folder, const Results& results) {
  Claim claim{1, "Head-wise falls faster early, full-matrix is better late", {}, {}};
  std::vector<std::pair<std::string, int64_t>> places = {
      {"", train::configure(folder.study.options).steps}};
  for (const auto& variant : folder.study.variants) {
    auto options = folder.study.options;
    options.insert(options.end(), variant.options.begin(), variant.options.end());
    const int64_t steps = train::configure(options).steps;
    if (steps != places.front().second) places.emplace_back(variant.name, steps);
  }
  // The longest training decides: a crossing may come later than a short one lasts.
  std::sort(places.begin(), places.end(), [](const auto& a, const auto& b) {
    return a.second < b.second;
  });
  for (const auto& [variant, steps] : places) {
    bool any = false, faster = true, slower = true, better = true, worse = true;
    for (const char* baseline : kBaselines) {
      const Band band = band_of(differences_of(
          curves_of(results, "head-wise", variant), curves_of(results, baseline, variant)));
      if (band.steps.size() < 3) continue;
      // Early: the validation nearest to a tenth of the training; weights are the same at step 0.
      size_t early = 1;
      for (size_t i = 1; i < band.steps.size(); ++i) {
        if (std::abs(10 * band.steps[i] - steps) < std::abs(10 * band.steps[early] - steps))
          early = i;
      }
      const size_t last = band.steps.size() - 1;
      const auto at = [&](size_t i) { return Interval{band.mean[i], band.low[i], band.high[i]}; };
      const auto count = static_cast<size_t>(band.count);
      const double crossing = crossing_step(band);
      claim.evidence.push_back(
          c10::str(
              variant.empty() ? "" : c10::str(variant, ": "), "head-wise less ", title(baseline),
              ": ", show(at(early), count), " at step ", band.steps[early], "; ",
              show(at(last), count), " at step ", band.steps[last], "; ",
              crossing < 0 ? "no crossing" : format("crossing at step %.0f", crossing)));
      any = true;
      faster = faster && side_of(at(early)) < 0;
      slower = slower && side_of(at(early)) > 0;
      better = better && side_of(at(last)) < 0;
      worse = worse && side_of(at(last)) > 0;
    }
    if (!any) continue;
    claim.verdict = faster && worse    ? Verdict::kSupported
                    : slower || better ? Verdict::kContradicted
                                       : Verdict::kUndecided;
  }
  claim.evidence.push_back(
      "Supported if, against both baselines, head-wise is below at a tenth of the training and "
      "above at its end; contradicted if "
      "it is above early or below at the end. The longest training decides");
  return claim;
}

Claim better_with_size(const Evidence& evidence) {
  Claim claim{2, "QK with random groups gets better with g up to 6", {}, {}};
  const auto ends = evidence.differences("qk-6-random", "qk-1");
  const auto whole = interval_of(ends);
  claim.evidence.push_back("g = 6 less g = 1: " + show(whole, ends.size()));
  for (size_t i = 1; i < std::size(kSizes); ++i) {
    const auto step = evidence.differences(
        grouped("qk", kSizes[i], "random"), grouped("qk", kSizes[i - 1], "random"));
    claim.evidence.push_back(
        c10::str(
            "g = ", kSizes[i], " less g = ", kSizes[i - 1], ": ",
            show(interval_of(step), step.size())));
  }
  claim.evidence.push_back("Decided by g = 6 less g = 1: below zero supports, above contradicts");
  if (ends.size() > 1 && side_of(whole) != 0) {
    claim.verdict = side_of(whole) < 0 ? Verdict::kSupported : Verdict::kContradicted;
  }
  return claim;
}

Claim random_is_best(const Evidence& evidence) {
  Claim claim{3, "Random beats adjacent and interval at equal g", {}, {}};
  bool below = true, above = true, any = false;
  for (const char* rule : {"adjacent", "interval"}) {
    std::vector<double> all;
    for (const int g : {2, 3, 4, 6}) {
      const auto list = evidence.differences(grouped("qk", g, "random"), grouped("qk", g, rule));
      all.insert(all.end(), list.begin(), list.end());
    }
    const auto interval = interval_of(all);
    claim.evidence.push_back(
        c10::str(
            "QK, random less ", rule, ", g = 2, 3, 4, 6: ", show(interval, all.size(), "pairs")));
    any = any || all.size() > 1;
    below = below && side_of(interval) < 0;
    above = above && side_of(interval) > 0;
  }
  claim.evidence.push_back(
      "Supported if both intervals are below zero, contradicted if both are above");
  if (any && below) claim.verdict = Verdict::kSupported;
  if (any && above) claim.verdict = Verdict::kContradicted;
  return claim;
}

// Settings that should be no better than the first of `bases`: a gain of less than half of what grouping QK gives counts
// as none.
Claim no_gain(
    const Evidence& evidence, Claim claim, const std::vector<std::string>& settings,
    const std::vector<std::string>& bases) {
  const auto reference = evidence.differences("qk-6-random", "three-way");
  const double margin = reference.empty() ? 0 : std::max(0.0, -interval_of(reference).mean / 2);
  for (const auto& base : bases) {
    const auto list = evidence.mean_differences(settings, base);
    const auto interval = interval_of(list);
    claim.evidence.push_back(
        c10::str(
            "mean of ", settings.size(), " settings less ", base, ": ",
            show(interval, list.size())));
    const auto better = std::count_if(settings.begin(), settings.end(), [&](const auto& name) {
      const auto own = evidence.differences(name, base);
      return !own.empty() && interval_of(own).mean < 0;
    });
    claim.evidence.push_back(
        c10::str(better, " of ", settings.size(), " have a lower mean than ", base));
    if (base != bases.front() || list.size() < 2) continue;
    if (interval.low > -margin) claim.verdict = Verdict::kSupported;
    if (side_of(interval) < 0) claim.verdict = Verdict::kContradicted;
  }
  claim.evidence.push_back(
      c10::str(
          "Decided by the difference to ", bases.front(),
          format(
              ": contradicted if its interval is below zero, supported if it is above -%.4f, half "
              "of what QK g = 6 "
              "random gains on three-way",
              margin)));
  return claim;
}

Claim best_beats_both(const Evidence& evidence) {
  Claim claim{6, "The best grouping beats both Full-QKV and head-wise", {}, {}};
  const SettingSummary* best = nullptr;
  int64_t groupings = 0;
  for (const auto& setting : evidence.analysis.main.settings) {
    const bool is_grouping =
        setting.name != "packed" && setting.name != "three-way" && setting.name != "head-wise";
    if (!is_grouping || setting.loss.count == 0) continue;
    ++groupings;
    // One with enough seeds, if there is any.
    const auto key = [](const SettingSummary& s) { return std::pair(s.exploratory, s.loss.mean); };
    if (best == nullptr || key(setting) < key(*best)) best = &setting;
  }
  if (best == nullptr) {
    claim.evidence.push_back("no grouping was measured");
    return claim;
  }
  bool beats = true, loses = false;
  for (const char* other : {"packed", "three-way", "head-wise"}) {
    const auto list = evidence.differences(best->name, other);
    // The best of many is not any setting: its interval is that for all of them at once.
    const auto interval = interval_of(list, 0.05 / static_cast<double>(groupings));
    claim.evidence.push_back(
        c10::str(best->name, " less ", other, ": ", show(interval, list.size())));
    beats = beats && list.size() > 1 && side_of(interval) < 0;
    loses = loses || (list.size() > 1 && side_of(interval) > 0);
  }
  claim.evidence.push_back(
      c10::str(
          "Intervals hold for all ", groupings, " groupings at once. ",
          best->exploratory ? "No grouping has enough seeds; "
                            : "Of the groupings with enough seeds; ",
          "supported if it is below all three, contradicted if it is above one"));
  if (beats) claim.verdict = Verdict::kSupported;
  if (loses) claim.verdict = Verdict::kContradicted;
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
  bool any = false, all_near = true, any_near = false;
  for (const auto& run : results.runs) {
    for (const char* of : {"gradient", "momentum"}) {
      const auto* whole = find_series(run, of, "three-way");
      const auto* heads = find_series(run, of, "1");
      if (whole == nullptr || heads == nullptr) continue;
      const double near = late_mean(whole->rank_ratio), heads_near = late_mean(heads->rank_ratio);
      claim.evidence.push_back(format(
          "%s, %s: rank by rows above 0.01 σ₁ %.3f whole, %.3f as sum of heads; above machine "
          "precision %.3f and %.3f",
          run.run.name.c_str(), of, near, heads_near, late_mean(whole->rank_ratio_machine),
          late_mean(heads->rank_ratio_machine)));
      any = true;
      const bool is_near = near > kNear && heads_near / near < 1 / kNear;
      all_near = all_near && is_near;
      any_near = any_near || is_near;
    }
  }
  claim.evidence.push_back(
      any ? "Means over Q and K of all layers in the second half of training. Supported if all are "
            "above 0.95 at 0.01 σ₁ and the sums "
            "within 5%, contradicted if none is"
          : kNoDiagnostics);
  if (any && all_near) claim.verdict = Verdict::kSupported;
  if (any && !any_near) claim.verdict = Verdict::kContradicted;
  return claim;
}

Claim larger_norms(const Results& results) {
  Claim claim{
      8, "Head-wise updates have a larger Σ‖Oᵢ‖² than full ones, both below the ideal", {}, {}};
  bool any = false, mostly = true, seldom = true, below = true;
  for (const auto& run : results.runs) {
    const auto* whole = find_series(run, "momentum", "three-way");
    const auto* heads = find_series(run, "momentum", "1");
    if (whole == nullptr || heads == nullptr) continue;
    const double full = late_mean(whole->squared_norm_ratio),
                 split = late_mean(heads->squared_norm_ratio);
    claim.evidence.push_back(format(
        "%s: ‖O‖² by its ideal %.3f whole, %.3f head-wise; head-wise larger in %.0f%% of all "
        "matrices and steps",
        run.run.name.c_str(), full, split, 100 * heads->larger_norms));
    any = true;
    mostly = mostly && heads->larger_norms > 0.5;
    seldom = seldom && heads->larger_norms < 0.5;
    below = below && full < 1 && split < 1;
  }
  claim.evidence.push_back(
      any ? "Supported if it is larger in most cases and both are below 1, contradicted if it is "
            "larger in few"
          : kNoDiagnostics);
  if (any && mostly && below) claim.verdict = Verdict::kSupported;
  if (any && (seldom || !below)) claim.verdict = Verdict::kContradicted;
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

double crossing_step(const Band& difference) {
  const auto& mean = difference.mean;
  if (mean.empty() || mean.back() <= 0) return -1;
  for (size_t i = mean.size() - 1; i > 0; --i) {
    if (mean[i - 1] >= 0) continue;
    const double part = -mean[i - 1] / (mean[i] - mean[i - 1]);
    const auto from = static_cast<double>(difference.steps[i - 1]);
    return from + part * (static_cast<double>(difference.steps[i]) - from);
  }
  return -1;
}

std::vector<Claim> check_claims(
    const Folder& folder, const Results& results, const Analysis& analysis) {
  const Evidence evidence{results, analysis};
  return {
      early_and_late(folder, results),
      better_with_size(evidence),
      random_is_best(evidence),
      no_gain(
          evidence, {4, "Grouping V gives no consistent gain", {}, {}},
          settings_with(analysis, "v-"), {"three-way", "packed"}),
      no_gain(
          evidence, {5, "Fixed-QK+V does not beat QK alone", {}, {}},
          settings_with(analysis, "fixed-qk-v-"), {"qk-6-random"}),
      best_beats_both(evidence),
      near_full_rank(results),
      larger_norms(results)};
}

}  // namespace study
