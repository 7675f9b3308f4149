#pragma once
// The record of a run: metrics.jsonl, a line a step or validation, and the same for TensorBoard.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "train/files.h"
#include "train/tensorboard.h"

namespace train {

class MetricsLog {
 public:
  /// Goes on in `folder` after `step`: lines of later steps, of a run that was cut off, are dropped.
  MetricsLog(const std::string& folder, int64_t step);
  void write(int64_t step, const std::vector<std::pair<std::string, double>>& values);

 private:
  OutputFile lines_;
  EventWriter events_;
};

}  // namespace train
