#pragma once
// Scalars for TensorBoard: records of protobuf events, with checksums, in a file it finds by its name.

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "train/files.h"

namespace train {

class EventWriter {
 public:
  /// A new events file in `folder`. What older files there say of steps after `first_step` no longer
  /// counts.
  EventWriter(const std::string& folder, int64_t first_step);
  void scalars(int64_t step, const std::vector<std::pair<std::string, double>>& values);

 private:
  void record(const std::string& event);
  std::unique_ptr<OutputFile> file_;
};

}  // namespace train
