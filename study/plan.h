#pragma once
// A study file: which settings with which seeds, and the training runs that follow from it.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "study/settings.h"
#include "train/config.h"

namespace study {

/// The variant of A/A runs.
constexpr const char* kNoiseVariant = "noise";

/// Some settings again with other options, such as half the learning rate.
struct Variant {
  std::string name;
  std::vector<std::string> settings;
  int64_t seeds = 1;
  train::Options options;
};

/// The contents of a study file.
struct Study {
  std::string data;                           // folder with shards; empty: not given
  bool keep_checkpoints = true;               // whether finished runs keep their checkpoints
  train::Options options;                     // options of every run: the base's, then the file's
  std::vector<Setting> own_settings;          // settings that the file itself defines
  std::vector<std::string> settings;          // names of all settings, own ones included
  int64_t seeds = 1;                          // number of seeds per setting
  int64_t first_seed = 0;                     // the lowest seed of every setting, variant and noise
  std::map<std::string, int64_t> more_seeds;  // larger numbers of seeds, by setting
  std::map<std::string, train::Options> tuned;  // more options of a setting, by setting
  std::vector<Variant> variants;
  /// A/A: this setting again, with noise_seeds seeds, from weights moved by one rounding error.
  std::string noise_setting;
  int64_t noise_seeds = 0;
};

/// Reads a study file. Paths in it are relative to it. An unknown key is an error that names the nearest known one.
Study read_study(const std::string& path);

/// The setting of that name, from Table 1 or the study's own. An unknown name is an error that suggests the nearest.
const Setting& find_setting(const Study& study, const std::string& name);

/// The setting's options in this study: what defines it, then those under [tuned].
train::Options setting_options(const Study& study, const std::string& setting);

/// The study as a self-contained file.
std::string to_toml(const Study& study);

/// One run of a study.
struct PlannedRun {
  std::string name;  // its folder: packed/seed-0, half-lr/packed/seed-0, noise/packed/seed-0
  std::string setting;
  std::string variant;  // empty: none; "noise": A/A
  int64_t seed = 0;
  train::Options options;  // everything except the data and the folder
};

/// All runs, ordered by seed, so that every setting gets its first seed before any gets its second.
std::vector<PlannedRun> make_plan(const Study& study);

/// The run of that name. An unknown name is an error that suggests the nearest.
const PlannedRun& find_run(const std::vector<PlannedRun>& plan, const std::string& name);

}  // namespace study
