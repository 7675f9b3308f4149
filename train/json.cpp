#include "train/json.h"

#include <c10/util/Exception.h>

#include <filesystem>

#include "train/files.h"

namespace train {
namespace {

constexpr uintmax_t kLargest = uintmax_t{16} << 20;

}  // namespace

nlohmann::json read_json(const std::string& path) {
  std::error_code missing;  // reading then says why
  const auto size = std::filesystem::file_size(path, missing);
  TORCH_CHECK_VALUE(
      missing || size <= kLargest, "'", path, "' is damaged: it has ", size, " bytes, at most ",
      kLargest, " are expected");
  auto json = parse_json(read_text(path));
  TORCH_CHECK_VALUE(
      json && json->is_object(), "'", path, "' is damaged: it does not hold a valid JSON object");
  return std::move(*json);
}

}  // namespace train
