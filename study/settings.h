#pragma once
// The settings of the paper's Table 1, plus our own, and the cells of the table that they fill.

#include <string>
#include <vector>

#include "train/config.h"

namespace study {

/// One algorithm, as options of a training run.
struct Setting {
  std::string name;   // also the name of its folder
  std::string title;  // for people
  train::Options options;
};

/// The 33 settings of Table 1, in its order, and three-way Full-QKV, our addition.
const std::vector<Setting>& table1_settings();

/// A number in the paper's table and its setting. Rules that give the same groups share a setting.
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
