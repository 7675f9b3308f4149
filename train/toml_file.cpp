#include "train/toml_file.h"

#include <filesystem>
#include <sstream>

#include "gpt/files.h"

namespace train {
namespace {

constexpr size_t kLargest = size_t{16} << 20;

}  // namespace

toml::table parse_toml_file(const std::string& path) {
  std::error_code problem;
  const auto status = std::filesystem::status(path, problem);
  TORCH_CHECK_VALUE(
      !problem || status.type() == std::filesystem::file_type::not_found, "'", path,
      "' cannot be read: ", problem.message());
  TORCH_CHECK_VALUE(std::filesystem::is_regular_file(status), "there is no file '", path, "'");
  try {
    return toml::parse(gpt::read_whole(path, kLargest), path);
  } catch (const toml::parse_error& error) {
    std::ostringstream where;
    where << error.source().begin;
    TORCH_CHECK_VALUE(false, "'", path, "': ", error.description(), " (", where.str(), ")");
  } catch (const c10::ValueError& error) {
    TORCH_CHECK_VALUE(false, "'", path, "': ", error.what_without_backtrace());
  }
}

}  // namespace train
