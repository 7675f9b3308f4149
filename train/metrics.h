#pragma once
// The record of a run: metrics.jsonl, a line a step or validation, and the same for TensorBoard.

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "train/files.h"
#include "train/tensorboard.h"

namespace train {

/// The file's path, after all lines are gone but those whole ones that `keep` wants: (step, has a validation loss).
std::string cut_back(const std::string& path, const std::function<bool(int64_t, bool)>& keep);

class MetricsLog {
 public:
  /// Begins anew in `folder`.
  explicit MetricsLog(const std::string& folder) : MetricsLog(folder, -1, true) {}
  /// Goes on after `step`, which was validated already or not: what the log says beyond that, by a
  /// run that was cut off, is dropped.
  MetricsLog(const std::string& folder, int64_t step, bool validated);
  /// `words` are in the file alone.
  void write(
      int64_t step, const std::vector<std::pair<std::string, double>>& values,
      const std::vector<std::pair<std::string, std::string>>& words = {});
  /// To the disk itself.
  void sync() { lines_.sync(); }

 private:
  OutputFile lines_;
  EventWriter events_;
};

}  // namespace train
