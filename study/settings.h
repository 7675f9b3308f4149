#pragma once
// The settings of the paper's Table 1 and of this project, and the cells of the table they fill.

#include <string>
#include <vector>

#include "train/config.h"

namespace study {

/// One algorithm: what it changes in a training run's options.
struct Setting {
  std::string name;   // of its folder, too
  std::string title;  // as a person reads it
  train::Options options;
};

/// All 33 that Table 1 comes to, in its order, and three-way Full-QKV, which is ours.
const std::vector<Setting>& table1_settings();

/// A number of the paper's table, and the setting that it is of. Rules that come to the same groups share a setting.
struct Cell {
  std::string row;     // Full-QKV Muon, QK, …
  std::string rule;    // adj., int., rand.; empty for baselines
  int group_size = 0;  // 0 for baselines
  double paper = 0;    // validation loss
  std::string setting;
};

/// The 37 cells, row by row.
const std::vector<Cell>& table1_cells();

}  // namespace study
