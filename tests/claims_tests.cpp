// The paper's claims and the conclusions, on made-up results with known answers.

#include <cmath>
#include <random>

#include "made_up_study.h"
#include "study/claims.h"
#include "study/tables.h"
#include "testing.h"

namespace study {
namespace {

Verdict verdict_of(const std::vector<Claim>& claims, int number) {
  return claims[static_cast<size_t>(number - 1)].verdict;
}

TEST(ClaimsTest, CrossingsAreWhereTheDifferenceComesToStayAboveZero) {
  const auto place = [](const std::vector<double>& mean) {
    Band band;
    for (size_t i = 0; i < mean.size(); ++i) band.steps.push_back(static_cast<int64_t>(100 * i));
    band.mean = mean;
    return crossing(band);
  };
  using Steps = std::pair<int64_t, int64_t>;
  EXPECT_EQ(place({0, -0.1, -0.05, 0.05, 0.1}), Steps(200, 300));
  EXPECT_EQ(place({0, -0.1, 0.1, -0.1, 0.3}), Steps(300, 400)) << "the last one";
  EXPECT_EQ(place({0, -0.1, -0.2, -0.1}), Steps(-1, -1));
  EXPECT_EQ(place({0, 0.1, 0.2, 0.1}), Steps(-1, -1)) << "above from the start is no crossing";
  EXPECT_EQ(place({}), Steps(-1, -1));
}

TEST(ClaimsTest, AWorldAsThePaperHasItSupportsItsClaims) {
  const auto folder = folder_of("unused", 8);
  const auto results = results_of(folder, [](const PlannedRun& run, int64_t step) {
    double effect = 0;
    const auto has = [&](const char* part) { return run.setting.find(part) != std::string::npos; };
    if (run.setting == "head-wise") effect = step < 250 ? -0.02 : 0.02;
    if (run.setting.rfind("qk-", 0) == 0) {
      effect = -0.005 * (run.setting[3] - '0') - (has("random") ? 0.01 : 0);
    }
    if (has("fixed-qk-v")) effect = -0.035;
    return seeded(run) + wobble(run) + (step == 0 ? 0 : effect);
  });
  const auto analysis = analyze(folder, results);
  const auto claims = check_claims(folder, results, analysis);
  ASSERT_EQ(claims.size(), 8);
  for (const int number : {1, 2, 3, 4, 5, 6}) {
    EXPECT_EQ(verdict_of(claims, number), Verdict::kSupported) << number;
  }
  EXPECT_NE(
      claims[0].evidence[0].find("crossing to above zero between steps 200 and 250"),
      std::string::npos)
      << claims[0].evidence[0];
  for (const int number : {7, 8}) {
    EXPECT_EQ(verdict_of(claims, number), Verdict::kUndecided) << "not measured";
  }
}

TEST(ClaimsTest, AWorldTheOtherWayRoundContradictsThem) {
  const auto folder = folder_of("unused", 8);
  auto results = results_of(folder, [](const PlannedRun& run, int64_t step) {
    double effect = 0;
    const auto has = [&](const char* part) { return run.setting.find(part) != std::string::npos; };
    if (run.setting == "head-wise") effect = -0.06;
    if (run.setting.rfind("qk-", 0) == 0) {
      effect = -0.04 + 0.005 * (run.setting[3] - '0') + (has("random") ? 0.004 : 0);
    }
    if (run.setting.rfind("v-", 0) == 0) effect = -0.03;
    if (has("fixed-qk-v")) effect = -0.05;
    return seeded(run) + wobble(run) + (step == 0 ? 0 : effect);
  });
  for (const char* of : {"gradient", "momentum"}) {
    for (const char* grouping : {"three-way", "1"}) {
      DiagnosticSeries series;
      series.of = of;
      series.grouping = grouping;
      series.steps = {0, 100};
      series.rank_ratio = {0.5, 0.6};
      series.rank_ratio_machine = {0.9, 0.9};
      series.squared_norm_ratio = {0.7, 0.7};
      series.larger_norms = 0.1;
      results.runs.front().diagnostics.push_back(series);
    }
  }
  const auto claims = check_claims(folder, results, analyze(folder, results));
  for (int number = 1; number <= 8; ++number) {
    EXPECT_EQ(verdict_of(claims, number), Verdict::kContradicted) << number;
  }
}

TEST(ClaimsTest, NothingIsClaimedOfNoiseOrOfNothing) {
  const auto folder = folder_of("unused", 3);
  const auto noise =
      results_of(folder, [](const PlannedRun& run, int64_t) { return seeded(run) + wobble(run); });
  for (const int number : {1, 2, 3, 6}) {
    const auto claims = check_claims(folder, noise, analyze(folder, noise));
    EXPECT_EQ(verdict_of(claims, number), Verdict::kUndecided) << number;
  }
  Results nothing;
  for (const auto& run : folder.plan) nothing.runs.emplace_back().run = run;
  const auto analysis = analyze(folder, nothing);
  for (const auto& claim : check_claims(folder, nothing, analysis)) {
    EXPECT_EQ(claim.verdict, Verdict::kUndecided) << claim.number;
  }
  EXPECT_NE(
      to_markdown(folder, nothing, analysis, {}).find("| QK | rand. | – (**3.2759**)"),
      std::string::npos);
}

// Eight seeds for a few settings, fewer for the rest.
Folder uneven_folder(int64_t seeds) {
  auto folder = folder_of("unused", seeds);
  for (const char* name : {"packed", "three-way", "head-wise", "qk-1"}) {
    folder.study.more_seeds[name] = 8;
  }
  folder.plan = make_plan(folder.study);
  return folder;
}

TEST(ClaimsTest, TheBestGroupingIsOneWhoseIntervalsSaySo) {
  const auto folder = uneven_folder(1);
  const auto results = results_of(folder, [](const PlannedRun& run, int64_t) {
    const double effect = run.setting == "qk-1"            ? -0.03
                          : run.setting == "qk-2-adjacent" ? -0.04
                                                           : 0;
    return seeded(run) + wobble(run) + effect;
  });
  const auto claim = check_claims(folder, results, analyze(folder, results))[5];
  EXPECT_EQ(claim.verdict, Verdict::kSupported);
  EXPECT_EQ(claim.evidence[0].rfind("qk-1 minus packed: -0.0", 0), 0) << claim.evidence[0];
  EXPECT_NE(claim.evidence[0].find("8 seeds"), std::string::npos) << "not one of a single seed";
}

TEST(ClaimsTest, WhatIsMeasuredHasToBeClear) {
  const auto folder = folder_of("unused", 1);
  auto results = results_of(folder, [](const PlannedRun& run, int64_t) { return seeded(run); });
  auto& measured = results.runs.front().diagnostics;
  for (const char* grouping : {"three-way", "1"}) {
    DiagnosticSeries series;
    series.of = "momentum";
    series.grouping = grouping;
    series.steps = {0, 100};
    series.rank_ratio = series.rank_ratio_machine = {1, 1};
    series.squared_norm_ratio = {0.7, 0.7};
    series.larger_norms = 0.55;
    measured.push_back(series);
  }
  const auto words = [&](size_t number) {
    return words_of(check_claims(folder, results, analyze(folder, results))[number - 1]);
  };
  EXPECT_EQ(words(8), "undecided") << "55% of the cases are not enough";
  measured.back().larger_norms = 0.8;
  EXPECT_EQ(words(8), "supported (exploratory)") << "one run";
  EXPECT_EQ(words(7), "supported (exploratory)");
  measured.front().rank_ratio = {0.6, 0.6};
  EXPECT_EQ(words(7), "undecided") << "the tolerances disagree";
  measured.front().rank_ratio_machine = {0.6, 0.6};
  EXPECT_EQ(words(7), "contradicted (exploratory)");
}

// A study of some settings. `effect` is how far each is from the rest.
template <typename Effect>
std::vector<Claim> claims_of(
    const std::vector<std::string>& settings, int64_t seeds, Effect&& effect) {
  auto folder = folder_of("unused", seeds);
  folder.study.settings = settings;
  folder.study.noise_seeds = 0;
  folder.plan = make_plan(folder.study);
  const auto results = results_of(folder, [&](const PlannedRun& run, int64_t step) {
    return seeded(run) + 0.1 * wobble(run) + (step == 0 ? 0 : effect(run.setting));
  });
  return check_claims(folder, results, analyze(folder, results));
}

TEST(ClaimsTest, TheEndsAloneSayNothingOfWhatIsBetween) {
  const auto effect = [](const std::string& name) { return name == "qk-6-random" ? -0.05 : 0; };
  const auto claims = claims_of({"packed", "three-way", "qk-1", "qk-6-random"}, 8, effect);
  EXPECT_EQ(verdict_of(claims, 2), Verdict::kUndecided);
}

TEST(ClaimsTest, OneGroupingThatLosesIsNotTheBest) {
  const auto effect = [](const std::string& name) { return name == "qk-6-random" ? 0.05 : 0; };
  const auto claims = claims_of({"packed", "three-way", "head-wise", "qk-6-random"}, 8, effect);
  EXPECT_EQ(verdict_of(claims, 6), Verdict::kUndecided);
}

TEST(ClaimsTest, FewSeedsMakeAVerdictExploratory) {
  const auto effect = [](const std::string& name) {
    return name == "qk-1" ? -0.1 : name == "head-wise" ? -0.05 : 0;
  };
  for (const int64_t seeds : {2, 8}) {
    const auto claims = claims_of({"packed", "three-way", "head-wise", "qk-1"}, seeds, effect);
    const std::string mark = seeds == 2 ? " (exploratory)" : "";
    EXPECT_EQ(words_of(claims[0]), "contradicted" + mark);
    EXPECT_EQ(words_of(claims[5]), "supported" + mark);
  }
}

TEST(ClaimsTest, WhatComesLateIsDecidedByTheLongestTraining) {
  auto folder = folder_of("unused", 8);
  folder.study.settings = {"packed", "three-way", "head-wise", "qk-1", "qk-6-random"};
  folder.study.variants = {{"long", folder.study.settings, 3, {{"steps", "800"}}}};
  folder.plan = make_plan(folder.study);
  const auto results = results_of(folder, [](const PlannedRun& run, int64_t step) {
    const double late = run.variant == "long" && step > 200 ? 0.05 : -0.05;
    const bool finer = run.setting == "head-wise" || run.setting == "qk-1";
    return seeded(run) + wobble(run) + (finer && step > 0 ? late : 0);
  });
  const auto claims = check_claims(folder, results, analyze(folder, results));
  EXPECT_EQ(words_of(claims[1]), "undecided") << "the sizes in between are not measured";
  EXPECT_EQ(claims[1].evidence[1].rfind("long: g = 6 minus g = 1: -0.0", 0), 0);
  EXPECT_EQ(words_of(claims[0]), "supported (exploratory)");
  EXPECT_EQ(claims[0].evidence.size(), 5)
      << "both trainings against both baselines, and the deciding rule";
}

TEST(ClaimsTest, VThatHurtsGainsNothingWhateverQkDoes) {
  std::vector<std::string> names = {"packed", "three-way"};
  for (const auto& setting : table1_settings()) {
    if (setting.name[0] == 'v') names.push_back(setting.name);
  }
  const auto hurts = [](const std::string& name) { return name[0] == 'v' ? 0.05 : 0; };
  EXPECT_EQ(words_of(claims_of(names, 8, hurts)[3]), "supported");
  const auto nothing = [](const std::string&) { return 0.0; };
  EXPECT_EQ(words_of(claims_of(names, 8, nothing)[3]), "undecided");
  names.push_back("qk-6-random");
  const auto gains = [](const std::string& name) { return name == "qk-6-random" ? -0.05 : 0; };
  EXPECT_EQ(words_of(claims_of(names, 8, gains)[3]), "supported")
      << "V gains far less than half of that";
}

TEST(ClaimsTest, ConclusionsNameTheLowestAndWhatCannotBeToldFromIt) {
  const auto folder = uneven_folder(2);
  const auto results = results_of(folder, [](const PlannedRun& run, int64_t) {
    const bool low = run.setting == "qk-1" || run.setting == "head-wise";
    const double effect = low ? -0.03 : run.setting == "v-1" ? -0.5 : 0;  // v-1 is exploratory
    return seeded(run) + wobble(run) + effect;
  });
  std::string text;
  for (const auto& line : conclusions(analyze(folder, results))) text += line + "\n";
  EXPECT_NE(text.find(" is lowest: 4.3"), std::string::npos) << text;
  EXPECT_NE(text.find(" minus packed: -0.0"), std::string::npos) << text;
  EXPECT_NE(text.find("It cannot be distinguished from "), std::string::npos) << text;
  EXPECT_EQ(text.find("v-1 "), text.find("v-1 (QK g = 6 random")) << text;
  EXPECT_NE(
      text.find("On the 2 seeds that all 34 settings have, the lowest are v-1, "),
      std::string::npos)
      << text;
  const auto few = folder_of("unused", 2);
  const auto exploratory =
      results_of(few, [](const PlannedRun& run, int64_t) { return seeded(run); });
  EXPECT_NE(conclusions(analyze(few, exploratory)).front().find("exploratory"), std::string::npos);
}

TEST(ClaimsTest, ConclusionsNeedNoPacked) {
  auto folder = folder_of("unused", 8);
  folder.study.settings = {"three-way", "qk-1", "v-1"};
  folder.study.noise_seeds = 0;
  folder.plan = make_plan(folder.study);
  const auto results = results_of(folder, [](const PlannedRun& run, int64_t) {
    return seeded(run) + wobble(run) - (run.setting == "qk-1" ? 0.05 : 0);
  });
  const auto lines = conclusions(analyze(folder, results));
  EXPECT_NE(lines.front().find("qk-1 (QK g = 1) is lowest"), std::string::npos) << lines.front();
}

TEST(ClaimsTest, OfEqualSettingsNoneIsSaidToBeBelowAnother) {
  constexpr int kStudies = 200;
  const auto folder = folder_of("unused", 8);
  std::mt19937_64 generator(1);
  std::normal_distribution<double> noise(0, 0.01);
  int wrong = 0;
  for (int study = 0; study < kStudies; ++study) {
    const auto results = results_of(
        folder, [&](const PlannedRun& run, int64_t) { return seeded(run) + noise(generator); });
    for (const auto& line : conclusions(analyze(folder, results))) {
      if (line.find(" minus ") == std::string::npos) continue;
      ++wrong;
      break;
    }
  }
  // 5% plus three standard errors of this simulation.
  EXPECT_LE(wrong, kStudies * (0.05 + 3 * std::sqrt(0.05 * 0.95 / kStudies)));
}

}  // namespace
}  // namespace study
