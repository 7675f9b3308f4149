// Marks and tables from made-up results with known answers, and the small parts of running a study.

#include <cmath>
#include <csignal>
#include <fstream>
#include <functional>
#include <random>
#include <thread>

#include "made_up_study.h"
#include "study/analysis.h"
#include "study/claims.h"
#include "study/cost.h"
#include "study/process.h"
#include "study/settings.h"
#include "study/slurm.h"
#include "study/tables.h"
#include "study/workers.h"
#include "testing.h"
#include "train/files.h"

namespace study {
namespace {

TEST(StudyTest, EffectsAreMarkedAndNoiseIsNot) {
  const auto folder = folder_of("unused", 8);
  const auto results = results_of(folder, [](const PlannedRun& run, int64_t) {
    const double effect = run.setting == "qk-6-random" ? -0.03 : run.setting == "v-1" ? 0.03 : 0;
    return seeded(run) + wobble(run) + effect;
  });
  const auto analysis = analyze(folder, results);
  for (const auto& setting : analysis.main.settings) {
    for (const auto& [baseline, comparison] : setting.against) {
      const Mark expected = setting.name == "qk-6-random" ? Mark::kBetter
                            : setting.name == "v-1"       ? Mark::kWorse
                                                          : Mark::kUndecided;
      EXPECT_EQ(comparison.mark, expected) << setting.name << " against " << baseline;
      EXPECT_EQ(comparison.difference.count, 8);
    }
    EXPECT_EQ(
        setting.against.size(), setting.name == "packed" || setting.name == "three-way" ? 1 : 2);
    EXPECT_FALSE(setting.exploratory);
  }
  ASSERT_TRUE(analysis.noise.has_value());
  EXPECT_EQ(analysis.noise->difference.count, 2);
  EXPECT_LT(analysis.noise->largest, 0.01);
}

TEST(StudyTest, UnderANullMarksAppearAtMostAtTheirRate) {
  // Like configs/table1-small.toml: five settings with eight seeds, all others with two. There is only noise.
  auto folder = folder_of("unused", 2);
  for (const char* name : {"packed", "three-way", "head-wise", "qk-1", "qk-6-random"}) {
    folder.study.more_seeds[name] = 8;
  }
  folder.plan = make_plan(folder.study);
  constexpr int kStudies = 300;
  std::mt19937_64 generator(11);
  std::normal_distribution<double> noise(0, 0.004);
  std::map<std::pair<std::string, bool>, int> marked;  // baseline and whether exploratory
  for (int study = 0; study < kStudies; ++study) {
    const auto results = results_of(
        folder, [&](const PlannedRun& run, int64_t) { return seeded(run) + noise(generator); });
    std::map<std::pair<std::string, bool>, bool> any;
    for (const auto& setting : analyze(folder, results).main.settings) {
      for (const auto& [baseline, comparison] : setting.against) {
        const bool is = comparison.mark != Mark::kUndecided;
        any[{baseline, comparison.exploratory}] = any[{baseline, comparison.exploratory}] || is;
      }
    }
    for (const auto& [family, is] : any) marked[family] += is ? 1 : 0;
  }
  EXPECT_EQ(marked.size(), 4);
  for (const auto& [family, count] : marked) {
    // 5% plus three standard errors of this simulation.
    EXPECT_LE(count, kStudies * (0.05 + 3 * std::sqrt(0.05 * 0.95 / kStudies))) << family.first;
  }
}

TEST(StudyTest, SettingsAreComparedAtTheBestLearningRateOfEach) {
  auto folder = folder_of("unused", 2);
  folder.study.settings = {"packed", "three-way", "head-wise", "qk-1"};
  folder.study.options.emplace_back("muon-lr", "0.001");
  folder.study.variants = {
      {"half", {"packed", "head-wise", "qk-1"}, 2, {{"muon-lr", "0.0005"}}},
      {"double", {"packed", "head-wise", "qk-1"}, 1, {{"muon-lr", "0.002"}}},
      {"long", {"packed"}, 1, {{"steps", "800"}, {"muon-lr", "0.004"}}}};
  folder.plan = make_plan(folder.study);
  const auto results = results_of(folder, [](const PlannedRun& run, int64_t) {
    const std::string best = run.setting == "head-wise" ? "half" : "";
    return seeded(run) + (run.variant == best ? 0 : 0.5) - (run.setting == "head-wise" ? 0.1 : 0);
  });
  const auto analysis = analyze(folder, results);
  ASSERT_EQ(analysis.variants.size(), 4);
  const auto& tuned = analysis.variants.back();
  EXPECT_EQ(tuned.find("three-way"), nullptr) << "it was tried at one rate only";
  const auto* heads = tuned.find("head-wise");
  ASSERT_NE(heads, nullptr);
  EXPECT_NE(heads->title.find(", at 0.0005 of 0.001, 0.0005, 0.002"), std::string::npos)
      << heads->title;
  EXPECT_NE(tuned.find("packed")->title.find(", at 0.001"), std::string::npos);
  EXPECT_EQ(heads->losses.size(), 1) << "only the seeds that all rates have";
  EXPECT_NEAR(heads->against.at("packed").difference.mean, -0.1, 1e-12);
  EXPECT_EQ(heads->curves.size(), 1) << "and the curves of the best rate";
  ASSERT_EQ(analysis.best_values.size(), 1);
  EXPECT_EQ(analysis.best_values[0].key, "muon-lr");
  const auto& choices = analysis.best_values[0].settings;
  ASSERT_EQ(choices.size(), 3);
  EXPECT_EQ(choices[0].best, "0.001");
  EXPECT_FALSE(choices[0].at_edge);
  EXPECT_EQ(choices[1].setting, "head-wise");
  EXPECT_EQ(choices[1].best, "0.0005");
  EXPECT_TRUE(choices[1].at_edge);
  std::vector<std::string> values;
  for (const auto& tried : choices[1].tried) values.push_back(tried.value);
  EXPECT_EQ(values, (std::vector<std::string>{"0.0005", "0.001", "0.002"})) << "by size";
  const auto plain = folder_of("unused", 1);
  EXPECT_TRUE(analyze(plain, results_of(plain, [](const PlannedRun&, int64_t) { return 1.0; }))
                  .variants.empty());
}

TEST(StudyTest, EachOptionThatVariantsSetHasItsBestValue) {
  auto folder = folder_of("unused", 2);
  folder.study.settings = {"three-way", "qk-1"};
  folder.study.options.emplace_back("muon-lr", "0.001");
  folder.study.tuned["qk-1"] = {{"adamw-lr", "0.002"}};
  folder.study.variants = {
      {"fast", {"three-way", "qk-1"}, 2, {{"muon-lr", "0.002"}}},
      {"wild", {"three-way", "qk-1"}, 2, {{"muon-lr", "0.004"}}},
      {"embedding", {"three-way"}, 2, {{"adamw-lr", "0.01"}}},
      {"both", {"three-way"}, 2, {{"muon-lr", "0.01"}, {"adamw-lr", "0.01"}}},
      {"words", {"three-way"}, 2, {{"precision", "fp32"}}},
      {"diagnosed", {"three-way"}, 2, {{"diagnose-every", "3"}}}};
  folder.plan = make_plan(folder.study);
  auto results = results_of(folder, [](const PlannedRun& run, int64_t) {
    return seeded(run) - (run.variant == "fast" || run.variant == "embedding" ? 0.1 : 0);
  });
  for (auto& result : results.runs) {
    if (result.run.variant == "wild") result.state = RunState::kFailed;
  }
  const auto analysis = analyze(folder, results);
  ASSERT_EQ(analysis.best_values.size(), 2);
  const auto& rates = analysis.best_values[0];
  EXPECT_EQ(rates.key, "muon-lr");
  ASSERT_EQ(rates.settings.size(), 2);
  EXPECT_EQ(rates.settings[0].best, "0.002");
  EXPECT_TRUE(rates.settings[0].at_edge) << "a rate that failed is no evidence of a middle";
  ASSERT_EQ(rates.settings[0].tried.size(), 3);
  EXPECT_EQ(rates.settings[0].tried[2].failed, 2);
  EXPECT_EQ(rates.settings[0].tried[2].loss.count, 0);
  EXPECT_EQ(rates.settings[1].title, "QK g = 1, adamw-lr = 0.002");
  EXPECT_EQ(analysis.best_values[1].key, "adamw-lr");
  ASSERT_EQ(analysis.best_values[1].settings.size(), 1);
  EXPECT_EQ(analysis.best_values[1].settings[0].tried[0].value, "0.0036") << "the default";
  EXPECT_EQ(analysis.best_values[1].settings[0].best, "0.01");
  const std::string table = to_markdown(folder, results, analysis, {});
  for (const char* words :
       {"# The best muon-lr of each setting",
        "| setting | seeds | 0.001 | 0.002 | 0.004 | best | |",
        "| 2 | 4.0500 ± 0.0707 | **3.9500** ± 0.0707 | –, 2 failed | 0.002 | edge |"}) {
    EXPECT_NE(table.find(words), std::string::npos) << words << table;
  }
}

TEST(StudyTest, TheFirstStepAtALossLiesBetweenValidations) {
  const Curve curve = {{0, 5.0}, {100, 4.0}, {200, 3.0}};
  EXPECT_EQ(first_step_at(curve, 3.5), 150);
  EXPECT_EQ(first_step_at(curve, 4), 100);
  EXPECT_EQ(first_step_at(curve, 3), 200);
  EXPECT_EQ(first_step_at(curve, 6), 0) << "reached before the first step";
  EXPECT_EQ(first_step_at(curve, 2.99), std::nullopt);
  EXPECT_EQ(first_step_at({{0, 5.0}, {100, 3.0}, {200, 4.0}, {300, 2.0}}, 3.5), 75)
      << "the first time counts, though the loss rises again";
  EXPECT_EQ(first_step_at({{0, NAN}, {100, 3.0}}, 3), 100);
  EXPECT_EQ(first_step_at({}, 3), std::nullopt);
}

// Straight curves that fall by `speed` over the baseline's steps, so that the baseline's loss is reached at 1 / speed.
Results straight(const Folder& folder, const std::function<double(const PlannedRun&)>& speed_of) {
  return results_of(folder, [&](const PlannedRun& run, int64_t step) {
    return seeded(run) - speed_of(run) * static_cast<double>(step) / 400;
  });
}

TEST(StudyTest, StepsToTheBaselinesLossHaveTheIntervalsOfTheirFractions) {
  const auto folder = folder_of("unused", 8);
  // All of these are reached between two validations.
  const std::vector<double> fractions = {0.81, 0.84, 0.79, 0.86, 0.83, 0.82, 0.88, 0.77};
  const auto results = straight(folder, [&](const PlannedRun& run) {
    if (run.setting == "qk-1") return 1 / fractions[run.seed];
    if (run.setting == "v-1") return run.seed < 5 ? 1.25 : 0.9;
    if (run.setting == "head-wise") return run.seed < 4 ? 1.25 : 0.9;
    return run.setting == "qk-2-random" ? 0.5 : 1.0;
  });
  const auto analysis = analyze(folder, results);
  const auto& single = analysis.main.find("qk-1")->against.at("three-way");
  ASSERT_TRUE(single.steps.less.has_value());
  EXPECT_EQ(single.steps.seeds, 8);
  EXPECT_EQ(single.steps.reached, 8);
  EXPECT_NEAR(single.steps.median, 0.825, 1e-12);
  EXPECT_EQ(single.family, 33);
  const auto& less = *single.steps.less;
  EXPECT_NEAR(1 + less.mean, 0.825, 1e-12);
  // SciPy 1.16.3: t.interval at 0.95 and at 1 - 0.05 / 33 with seven degrees of freedom, and permutation_test.
  EXPECT_NEAR(1 + less.low, 0.7950229162939818, 1e-12);
  EXPECT_NEAR(1 + less.high, 0.8549770837060181, 1e-12);
  EXPECT_NEAR(1 + less.simultaneous_low, 0.7612464477701344, 1e-11);
  EXPECT_NEAR(1 + less.simultaneous_high, 0.8887535522298655, 1e-11);
  EXPECT_EQ(less.p, 0.0078125);
  EXPECT_NEAR(single.steps.holm, 33 * 0.0078125, 1e-12) << "others count as tests without a result";
  EXPECT_EQ(single.steps.mark, Mark::kBetter);
  // Five of eight seeds get there: a median, but no mean or interval, since those five are the lucky ones.
  const auto& some = analysis.main.find("v-1")->against.at("three-way").steps;
  EXPECT_EQ(some.reached, 5);
  EXPECT_FALSE(some.less.has_value());
  EXPECT_NEAR(some.median, 0.8, 1e-12);
  EXPECT_EQ(some.mark, Mark::kUndecided);
  EXPECT_EQ(words_of(some), "reached by 5 of 8, median 0.8000");
  const auto& half = analysis.main.find("head-wise")->against.at("three-way").steps;
  EXPECT_EQ(words_of(half), "reached by 4 of 8, no median");
  const auto& none = analysis.main.find("qk-2-random")->against.at("packed").steps;
  EXPECT_EQ(none.reached, 0);
  EXPECT_EQ(words_of(none), "never");
  // A setting that is the baseline in all but name gets there at the last step.
  EXPECT_NEAR(1 + analysis.main.find("packed")->against.at("three-way").steps.less->mean, 1, 1e-12);
  const std::string table = to_markdown(folder, results, analysis, {});
  EXPECT_NE(table.find("# Steps to a baseline's final loss"), std::string::npos);
  EXPECT_NE(table.find("| 8 | reached by 5 of 8, median 0.8000 |"), std::string::npos) << table;
}

TEST(StudyTest, StepsAreComparedOnTheSeedsThatBothHave) {
  const auto folder = folder_of("unused", 3);
  auto results =
      straight(folder, [](const PlannedRun& run) { return run.setting == "qk-1" ? 1.25 : 1.0; });
  for (auto& run : results.runs) {
    if (run.run.name == "qk-1/seed-0") run.state = RunState::kRunning;
    if (run.run.name == "three-way/seed-1") run.state = RunState::kRunning;
  }
  const auto& single = *analyze(folder, results).main.find("qk-1");
  EXPECT_EQ(single.against.at("three-way").steps.seeds, 1);
  EXPECT_EQ(words_of(single.against.at("three-way").steps), "0.8000");
  EXPECT_TRUE(std::isnan(single.against.at("three-way").steps.holm)) << "one seed tests nothing";
  EXPECT_EQ(single.against.at("packed").steps.seeds, 2);
}

TEST(StudyTest, UnderANullStepsAreMarkedAtMostAtTheirRate) {
  // The baseline and five settings have the same speed but for noise. Those that never get there are not marked.
  auto folder = folder_of("unused", 6);
  folder.study.settings = {"three-way", "packed", "qk-1", "v-1", "head-wise"};
  folder.plan = make_plan(folder.study);
  constexpr int kStudies = 400;
  std::mt19937_64 generator(5);
  std::normal_distribution<double> noise(0, 0.02);
  int marked = 0;
  for (int study = 0; study < kStudies; ++study) {
    std::map<std::string, double> speeds;
    for (const auto& run : folder.plan) speeds[run.name] = 1 + noise(generator);
    const auto analysis =
        analyze(folder, straight(folder, [&](const PlannedRun& run) { return speeds[run.name]; }));
    bool any = false;
    for (const auto& setting : analysis.main.settings) {
      const auto found = setting.against.find("three-way");
      any = any || (found != setting.against.end() && found->second.steps.mark != Mark::kUndecided);
    }
    marked += any ? 1 : 0;
  }
  EXPECT_LE(marked, kStudies * (0.05 + 3 * std::sqrt(0.05 * 0.95 / kStudies)));
}

TEST(TablesTest, DifferencesAreWrittenStepByStep) {
  const auto folder = folder_of("unused", 2);
  const auto results = straight(folder, [](const PlannedRun& run) {
    return run.setting != "qk-1" ? 1.0 : run.seed == 0 ? 2.0 : 3.0;
  });
  const std::string text = differences_csv(analyze(folder, results));
  EXPECT_EQ(text.find("variant,setting,baseline,step,seeds,difference,low,high\n"), 0);
  EXPECT_NE(text.find("\n,qk-1,three-way,0,2,0,0,0\n"), std::string::npos) << text.substr(0, 300);
  // At half of the steps: -0.5 and -1. Student's t with one degree of freedom has the quantile 12.706.
  EXPECT_NE(text.find("\n,qk-1,three-way,200,2,-0.75,-3.92655118,2.42655118\n"), std::string::npos);
}

TEST(StudyTest, TextFromFilesIsEscapedInEveryTable) {
  auto folder = folder_of("unused", 2);
  folder.study.own_settings = {
      {"own_one", "own_one", {{"qk-group", "1`<i>`"}, {"v-group", "<u>\n# all"}}}};
  folder.study.settings.emplace_back("own_one");
  folder.plan = make_plan(folder.study);
  auto results = results_of(folder, [](const PlannedRun& run, int64_t) { return seeded(run); });
  results.runs[0].state = RunState::kFailed;
  results.runs[0].error = "'/a <b>/c|d&e/[x](y)' failed\n| | `*`";
  results.problems = {"packed/seed-1: <script>alert(1)</script>"};
  auto analysis = analyze(folder, results);
  for (auto& setting : analysis.main.settings) {
    if (setting.name == "own_one") setting.title = "a\"b_c\\d{$&#%^~}<e>|";
  }
  const auto markdown = to_markdown(folder, results, analysis, {});
  for (const char* raw : {"<b>", "<i>", "<u>", "<script>", "</script>", "<e>", "[x](", "c|d"}) {
    EXPECT_EQ(markdown.find(raw), std::string::npos) << raw;
  }
  for (const char* escaped :
       {"'/a &lt;b&gt;/c\\|d&amp;e/\\[x\\](y)' failed \\| \\| \\`\\*\\`\n",
        "&lt;script&gt;alert(1)&lt;/script&gt;\n", "own\\_one, defined by this study:"}) {
    EXPECT_NE(markdown.find(escaped), std::string::npos) << escaped << markdown.substr(0, 500);
  }
  EXPECT_NE(to_csv(analysis).find(",own_one,\"a\"\"b_c\\d{$&#%^~}<e>|\","), std::string::npos);
  EXPECT_NE(
      to_latex(analysis).find(
          "a\"b\\_c\\textbackslash{}d\\{\\$\\&\\#\\%\\textasciicircum{}"
          "\\textasciitilde{}\\}<e>|"),
      std::string::npos);
}

TEST(StudyTest, UnreadableAndUnfinishedRunsDoNotCount) {
  const auto folder = folder_of("unused", 3);
  auto results = results_of(folder, [](const PlannedRun& run, int64_t) { return seeded(run); });
  for (auto& run : results.runs) {
    if (run.run.name == "packed/seed-0") run.readable = false;
    if (run.run.name == "three-way/seed-1") run.state = RunState::kFailed;
  }
  const auto analysis = analyze(folder, results);
  EXPECT_EQ(analysis.main.find("packed")->loss.count, 2);
  EXPECT_EQ(analysis.main.find("three-way")->against.at("packed").difference.count, 1)
      << "only the seeds that both have";
  EXPECT_TRUE(analysis.main.find("packed")->exploratory);
  EXPECT_EQ(analysis.main.find("nothing"), nullptr);
}

TEST(StudyTest, GroupSizesAreComparedOnTheSeedsThatAllHave) {
  const auto folder = folder_of("unused", 3);
  auto results = results_of(folder, [](const PlannedRun& run, int64_t) { return seeded(run); });
  for (auto& run : results.runs) {
    const bool missing = run.run.setting == "qk-2-random" && run.run.seed != 1;
    if (missing || run.run.setting == "qk-3-random") run.state = RunState::kWaiting;
  }
  const auto sizes = analyze(folder, results).group_sizes;
  ASSERT_EQ(sizes.settings.size(), 6) << "all that have results";
  for (const auto& setting : sizes.settings) {
    EXPECT_EQ(setting.curve.count, 1) << setting.name;
    EXPECT_EQ(setting.curve.mean.back(), 4.1) << setting.name;
  }
}

TEST(StudyTest, WhatLacksFailedSeedsIsExploratory) {
  const auto folder = folder_of("unused", 8);
  auto results = results_of(folder, [](const PlannedRun& run, int64_t) {
    const bool whole = run.setting == "packed" || run.setting == "three-way";
    return seeded(run) + wobble(run) - (whole ? 0 : 0.1);
  });
  for (auto& run : results.runs) {
    if (run.run.name == "head-wise/seed-7") run.state = RunState::kFailed;
  }
  const auto analysis = analyze(folder, results);
  const auto& heads = *analysis.main.find("head-wise");
  EXPECT_EQ(heads.failed, 1);
  EXPECT_TRUE(heads.exploratory && heads.against.at("packed").exploratory);
  EXPECT_EQ(heads.against.at("packed").family, 1);
  const auto& single = analysis.main.find("qk-1")->against.at("packed");
  EXPECT_FALSE(single.exploratory);
  EXPECT_EQ(single.family, 32) << "all but the baseline and the one that failed";
  const auto claims = check_claims(folder, results, analysis);
  EXPECT_EQ(words_of(claims[0]), "contradicted (exploratory)");
  const std::string table = to_markdown(folder, results, analysis, claims);
  for (const char* words :
       {"7, 1 failed |", "ᵉ 1 failed △ (3.2799)",
        "head-wise is left out because 1 of its runs failed", "7 seeds, others failed"}) {
    EXPECT_NE(table.find(words), std::string::npos) << words << table;
  }
}

TEST(StudyTest, BandsHaveTheStepsThatAllCurvesHave) {
  const auto band = band_of({{{0, 1.0}, {10, 2.0}, {20, 3.0}}, {{0, 3.0}, {20, 5.0}}});
  EXPECT_EQ(band.steps, (std::vector<int64_t>{0, 20}));
  EXPECT_EQ(band.mean, (std::vector<double>{2, 4}));
  EXPECT_LT(band.low[0], 2);
  EXPECT_EQ(band_of({}).count, 0);
}

TEST(TablesTest, TheBestRuleOfARowIsMarked) {
  const auto folder = folder_of("unused", 2);
  const auto results = results_of(folder, [](const PlannedRun& run, int64_t) {
    return seeded(run) - (run.setting == "qk-4-interval" ? 0.1 : 0) - 1e-6 * run.setting.size();
  });
  const auto analysis = analyze(folder, results);
  for (size_t i = 0; i < table1_cells().size(); ++i) {
    const auto& cell = table1_cells()[i];
    if (cell.row == "QK" && cell.group_size == 4) {
      EXPECT_EQ(is_best_rule(analysis.main, i), cell.rule == "int.");
    }
    EXPECT_FALSE(cell.group_size < 2 && is_best_rule(analysis.main, i));
  }
  const std::string latex = to_latex(analysis);
  EXPECT_NE(latex.find("\\textbf{3.95"), std::string::npos) << latex;
}

TEST(WorkersTest, RunsThatOneMayOnlyReadCanBeLookedAt) {
  const TemporaryFolder folder;
  EXPECT_FALSE(train::is_locked(folder / "none"));
  auto lock = train::wait_for_lock(folder / "", 0);
  std::filesystem::permissions(folder / "lock", std::filesystem::perms(0444));
  std::filesystem::permissions(folder / "", std::filesystem::perms(0555));
  const uid_t own = geteuid();
  if (own == 0) {  // permissions do not stop root
    ASSERT_EQ(seteuid(65534), 0);
  }
  EXPECT_TRUE(train::is_locked(folder / ""));
  lock.reset();
  EXPECT_FALSE(train::is_locked(folder / ""));
  EXPECT_FALSE(train::is_locked(folder / "")) << "looking leaves no lock behind";
  ASSERT_EQ(seteuid(own), 0);
  std::filesystem::permissions(folder / "", std::filesystem::perms(0755));
}

TEST(WorkersTest, ProgramsEndAsTheyEnd) {
  std::string text;
  EXPECT_EQ(run_program({"sh", "-c", "echo out; echo err >&2; exit 3"}, &text), 3);
  EXPECT_EQ(text, "out\nerr\n");
  EXPECT_EQ(run_program({"sh", "-c", "kill -9 $$"}), kSignal + 9);
  EXPECT_ERROR_SAYS(run_program({"/nowhere/program"}), "cannot start /nowhere/program");
  const auto before = std::signal(SIGCHLD, SIG_IGN);  // as some parents do
  EXPECT_EQ(run_program({"false"}), 1);
  std::signal(SIGCHLD, before);
}

TEST(WorkersTest, SlurmScript) {
  const TemporaryFolder place;
  auto folder = folder_of(place / "study", 1);
  record_result(
      (train::make_folder(place / "study/packed/seed-0"), place / "study/packed/seed-0"), 1);
  const RunCommand command = [](const std::string& run, bool retry) {
    EXPECT_TRUE(retry);  // whoever submits to Slurm asked for these runs
    return std::vector<std::string>{"/bin/program", "one", run, "--threads", "3"};
  };
  const std::string script =
      slurm_script(folder, {.jobs = 2, .threads = 3, .device = "cuda"}, command, false, "--time=5");
  for (const char* line :
       {"#SBATCH --array=0-34%2\n", "set -- \\\n  head-wise/seed-0 \\\n  three-way/seed-0",
        "#SBATCH --cpus-per-task=3\n", "#SBATCH --gres=gpu:1\n", "#SBATCH --time=5\n",
        "exec /bin/program one \"$1\" --threads 3\n"}) {
    EXPECT_NE(script.find(line), std::string::npos) << line << script;
  }
  for (const char* name : {"with blank", "a;id", "a$b", "a%b", "a'b", "a(b"}) {
    folder.path = place / name;
    EXPECT_ERROR_SAYS(slurm_script(folder, {}, command, false, ""), "special characters");
  }
  folder.path = place / "study";
  const RunCommand blank = [](const std::string& run, bool) {
    return std::vector<std::string>{"/bin/a program", run};
  };
  EXPECT_ERROR_SAYS(slurm_script(folder, {}, blank, false, ""), "special characters");
}

TEST(WorkersTest, JobsAreSpreadOverGpus) {
  using Names = std::vector<std::string>;
  EXPECT_EQ(gpus_of_jobs("", 2, 3), (Names{"0", "1", "0"}));
  EXPECT_EQ(gpus_of_jobs("4,7", 2, 2), (Names{"4", "7"}));
  EXPECT_EQ(gpus_of_jobs("GPU-abc", 1, 1), (Names{"GPU-abc"}));
}

TEST(WorkersTest, JobsFitCoresAndMemory) {
  auto folder = folder_of("unused", 1);
  const auto cores = static_cast<int64_t>(std::thread::hardware_concurrency());
  const auto workers = choose_workers(folder, {});
  EXPECT_GE(workers.jobs, 1);
  EXPECT_LE(workers.jobs * workers.threads, cores);
  EXPECT_EQ(choose_workers(folder, {.jobs = 1}).threads, cores);
  EXPECT_EQ(choose_workers(folder, {.jobs = 1000}).threads, 1);
  folder.study.options.insert(folder.study.options.end(), {{"width", "49152"}, {"layers", "200"}});
  folder.plan = make_plan(folder.study);
  EXPECT_EQ(choose_workers(folder, {}).jobs, 1) << "more would not fit into any memory";
  if (!torch::cuda::is_available()) {
    EXPECT_ERROR_SAYS(choose_workers(folder, {.device = "cuda"}), "no GPU");
  }
}

}  // namespace
}  // namespace study
