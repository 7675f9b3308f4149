#pragma once
// Studies with made-up results, so that the answers are known.

#include <random>
#include <string>

#include "study/results.h"
#include "study/settings.h"

namespace study {

/// A study of all settings, in a folder without files.
inline Folder folder_of(const std::string& path, int64_t seeds) {
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

/// Results in which every run is finished. `loss_of` gives the loss at each validation.
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

/// The effect of the seed is large, that of the noise (wobble) small.
inline double seeded(const PlannedRun& run) { return 4 + 0.1 * static_cast<double>(run.seed); }
inline double wobble(const PlannedRun& run) {
  std::mt19937_64 generator(std::hash<std::string>()(run.name));
  return std::normal_distribution<double>(0, 0.001)(generator);
}

}  // namespace study
