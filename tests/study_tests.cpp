// From results to marks, claims and tables, on results made up so that the answer is known; and the small parts of running.

#include <cmath>
#include <fstream>
#include <random>
#include <thread>

#include "study/analysis.h"
#include "study/claims.h"
#include "study/cost.h"
#include "study/settings.h"
#include "study/slurm.h"
#include "study/tables.h"
#include "study/workers.h"
#include "testing.h"
#include "train/files.h"

namespace study {
namespace {

// A study of all settings, in a folder where nothing is.
Folder folder_of(const std::string& path, int64_t seeds) {
  Folder folder;
  folder.path = path;
  for (const auto& setting : table1_settings()) folder.study.settings.push_back(setting.name);
  folder.study.seeds = seeds;
  folder.study.options = {
      {"steps", "400"}, {"warmdown", "100"}, {"validation-interval", "100"}, {"vocabulary", "64"}};
  folder.study.noise_setting = "packed";
  folder.study.noise_seeds = 2;
  folder.plan = make_plan(folder.study);
  return folder;
}

// Every run finished with the loss that `loss_of` says at each validation.
template <typename LossOf>
Results results_of(const Folder& folder, LossOf&& loss_of) {
  Results results;
  for (const auto& run : folder.plan) {
    RunResult result;
    result.run = run;
    result.state = RunState::kFinished;
    for (int64_t step = 0; step <= 400; step += 50) result.curve[step] = loss_of(run, step);
    result.loss = result.curve.rbegin()->second;
    results.runs.push_back(result);
  }
  return results;
}

// Seeds differ much, settings little, and noise less.
double seeded(const PlannedRun& run) { return 4 + 0.1 * static_cast<double>(run.seed); }
double wobble(const PlannedRun& run) {
  std::mt19937_64 generator(std::hash<std::string>()(run.name));
  return std::normal_distribution<double>(0, 0.001)(generator);
}

Verdict verdict_of(const std::vector<Claim>& claims, int number) {
  return claims[static_cast<size_t>(number - 1)].verdict;
}

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
  // As configs/table1-small.toml: five settings with eight seeds, all others with two, and nothing but noise.
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
    // 5% and three standard errors of this simulation.
    EXPECT_LE(count, kStudies * (0.05 + 3 * std::sqrt(0.05 * 0.95 / kStudies))) << family.first;
  }
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

TEST(StudyTest, BandsHaveTheStepsThatAllCurvesHave) {
  const auto band = band_of({{{0, 1.0}, {10, 2.0}, {20, 3.0}}, {{0, 3.0}, {20, 5.0}}});
  EXPECT_EQ(band.steps, (std::vector<int64_t>{0, 20}));
  EXPECT_EQ(band.mean, (std::vector<double>{2, 4}));
  EXPECT_LT(band.low[0], 2);
  EXPECT_EQ(band_of({}).count, 0);
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
  EXPECT_NE(claims[0].evidence[0].find("crossing between steps 200 and 250"), std::string::npos)
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
      series.rank_ratio_machine = {1, 1};
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

TEST(ClaimsTest, TheBestGroupingIsOneWhoseIntervalsSaySo) {
  auto folder = folder_of("unused", 1);
  for (const char* name : {"packed", "three-way", "head-wise", "qk-1"}) {
    folder.study.more_seeds[name] = 8;
  }
  folder.plan = make_plan(folder.study);
  const auto results = results_of(folder, [](const PlannedRun& run, int64_t) {
    const double effect = run.setting == "qk-1"            ? -0.03
                          : run.setting == "qk-2-adjacent" ? -0.04
                                                           : 0;
    return seeded(run) + wobble(run) + effect;
  });
  const auto claim = check_claims(folder, results, analyze(folder, results))[5];
  EXPECT_EQ(claim.verdict, Verdict::kSupported);
  EXPECT_EQ(claim.evidence[0].rfind("qk-1 less packed: -0.0", 0), 0) << claim.evidence[0];
  EXPECT_NE(claim.evidence[0].find("8 seeds"), std::string::npos) << "not one of a single seed";
}

TEST(ClaimsTest, NormsThatAreLargerHalfOfTheTimeDecideNothing) {
  const auto folder = folder_of("unused", 1);
  auto results = results_of(folder, [](const PlannedRun& run, int64_t) { return seeded(run); });
  for (const char* grouping : {"three-way", "1"}) {
    DiagnosticSeries series;
    series.of = "momentum";
    series.grouping = grouping;
    series.steps = {0, 100};
    series.rank_ratio = series.rank_ratio_machine = {1, 1};
    series.squared_norm_ratio = {0.7, 0.7};
    series.larger_norms = 0.55;
    results.runs.front().diagnostics.push_back(series);
  }
  const auto verdict = [&] {
    return verdict_of(check_claims(folder, results, analyze(folder, results)), 8);
  };
  EXPECT_EQ(verdict(), Verdict::kUndecided);
  results.runs.front().diagnostics.back().larger_norms = 0.8;
  EXPECT_EQ(verdict(), Verdict::kSupported);
}

TEST(ClaimsTest, ConclusionsNameTheLowestAndWhatCannotBeToldFromIt) {
  auto folder = folder_of("unused", 2);
  for (const char* name : {"packed", "three-way", "head-wise", "qk-1"}) {
    folder.study.more_seeds[name] = 8;
  }
  folder.plan = make_plan(folder.study);
  const auto results = results_of(folder, [](const PlannedRun& run, int64_t) {
    const bool low = run.setting == "qk-1" || run.setting == "head-wise";
    const double effect = low ? -0.03 : run.setting == "v-1" ? -0.5 : 0;  // v-1 is exploratory
    return seeded(run) + wobble(run) + effect;
  });
  std::string text;
  for (const auto& line : conclusions(analyze(folder, results))) text += line + "\n";
  EXPECT_NE(text.find(" is lowest: 4.3"), std::string::npos) << text;
  EXPECT_NE(text.find(" less packed: -0.0"), std::string::npos) << text;
  EXPECT_NE(text.find("It cannot be told from "), std::string::npos) << text;
  EXPECT_EQ(text.find("v-1"), std::string::npos) << text;
  const auto few = folder_of("unused", 2);
  const auto exploratory =
      results_of(few, [](const PlannedRun& run, int64_t) { return seeded(run); });
  EXPECT_NE(conclusions(analyze(few, exploratory)).front().find("exploratory"), std::string::npos);
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

TEST(WorkersTest, SlurmScript) {
  const TemporaryFolder place;
  auto folder = folder_of(place / "study", 1);
  record_result(
      (train::make_folder(place / "study/packed/seed-0"), place / "study/packed/seed-0"), 1);
  const std::string script = slurm_script(
      folder, {.jobs = 2, .threads = 3, .device = "cuda"}, false, "/bin/program", "--time=5");
  for (const char* line :
       {"#SBATCH --array=0-34%2\n", "set -- \\\n  head-wise/seed-0 \\\n  three-way/seed-0",
        "#SBATCH --cpus-per-task=3\n", "#SBATCH --gres=gpu:1\n", "#SBATCH --time=5\n",
        " study run ", "\"$1\" --threads 3 --device cuda\n"}) {
    EXPECT_NE(script.find(line), std::string::npos) << line << script;
  }
  for (const char* name : {"with blank", "a;id", "a$b", "a%b", "a'b", "a(b"}) {
    folder.path = place / name;
    EXPECT_ERROR_SAYS(slurm_script(folder, {}, false, "/bin/program", ""), "special signs");
  }
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
