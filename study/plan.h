#pragma once
// A study file: which settings with which seeds, and the training runs that they come to.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "study/settings.h"
#include "train/config.h"

namespace study {

/// The variant of A/A runs.
constexpr const char* kNoiseVariant = "noise";

/// The same settings with other options, such as half the learning rate.
struct Variant {
  std::string name;
  std::vector<std::string> settings;
  int64_t seeds = 1;
  train::Options options;
};

/// What a study file says.
struct Study {
  std::string data;                           // shards; empty: not said
  bool keep_checkpoints = true;               // of runs that are finished
  train::Options options;                     // of every run: those of its base, then its own
  std::vector<Setting> own_settings;          // that the file describes, run like the others
  std::vector<std::string> settings;          // names, its own among them
  int64_t seeds = 1;                          // of each
  std::map<std::string, int64_t> more_seeds;  // of some
  std::vector<Variant> variants;
  /// A/A: this setting once more with so many seeds, from weights moved by one rounding error.
  std::string noise_setting;
  int64_t noise_seeds = 0;
};

/// Reads one; paths in it are relative to it. Unknown words are errors with the nearest known one.
Study read_study(const std::string& path);

/// The setting of that name, of Table 1 or of the study's own, or an error with the nearest.
const Setting& find_setting(const Study& study, const std::string& name);

/// The same as a file that stands by itself.
std::string to_toml(const Study& study);

/// One run of a study.
struct PlannedRun {
  std::string
      name;  // its folder within the study's: packed/seed-0, half-lr/packed/seed-0, noise/packed/seed-0
  std::string setting;
  std::string variant;  // empty: none; "noise": A/A
  int64_t seed = 0;
  train::Options options;  // all but the data and the folder
};

/// Seed by seed, so that every setting has some before any has all.
std::vector<PlannedRun> make_plan(const Study& study);

/// The run of that name, or an error with the nearest.
const PlannedRun& find_run(const std::vector<PlannedRun>& plan, const std::string& name);

}  // namespace study
