#pragma once
// Writes scalars for TensorBoard: protobuf events with checksums, in a file whose name TensorBoard recognizes.

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "train/files.h"

namespace train {

class EventWriter {
 public:
  /// Creates a new events file in `folder`. TensorBoard then ignores steps after `first_step` in older files.
  EventWriter(const std::string& folder, int64_t first_step);
  void scalars(int64_t step, const std::vector<std::pair<std::string, double>>& values);

 private:
  void record(const std::string& event);
  std::unique_ptr<OutputFile> file_;
};

}  // namespace train
