#pragma once
// The record of a run: metrics.jsonl, with one line per step or validation, and the same values for TensorBoard.

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "train/files.h"
#include "train/tensorboard.h"

namespace train {

/// Removes the lines for which `keep(step, has a validation loss)` is false, and a last line that was cut off. Other
/// lines that cannot be read are removed, too, but then a copy of the file stays, and the returned notes say so.
std::vector<std::string> cut_back(
    const std::string& path, const std::function<bool(int64_t, bool)>& keep);

class MetricsLog {
 public:
  /// Starts a new log in `folder`.
  explicit MetricsLog(const std::string& folder) : MetricsLog(folder, -1, true) {}
  /// Continues after `step`. Drops later lines, which an interrupted run may have left, and the validation of `step`
  /// unless it was `validated`.
  MetricsLog(const std::string& folder, int64_t step, bool validated);
  /// `words` go only to metrics.jsonl, not to TensorBoard.
  void write(
      int64_t step, const std::vector<std::pair<std::string, double>>& values,
      const std::vector<std::pair<std::string, std::string>>& words = {});
  /// Flushes metrics.jsonl to disk.
  void sync() { lines_.sync(); }
  /// What was wrong with the log that is continued.
  const std::vector<std::string>& notes() const { return notes_; }

 private:
  std::vector<std::string> notes_;
  OutputFile lines_;
  EventWriter events_;
};

}  // namespace train
