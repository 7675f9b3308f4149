#pragma once
// TOML files, with errors that name them.

#include <c10/util/Exception.h>

#define TOML_EXCEPTIONS 1
#include <toml++/toml.h>

#include <filesystem>
#include <sstream>
#include <string>

namespace train {

/// A text, a number, true or false, as a flag would have it; other things are an error that names them.
std::string text_of(const toml::node& node, const std::string& name);

/// What `use` makes of the file's table. Errors of the file and of `use` begin with its path.
template <typename Use>
auto read_toml(const std::string& path, Use&& use) {
  TORCH_CHECK_VALUE(std::filesystem::is_regular_file(path), "there is no file '", path, "'");
  try {
    return use(toml::parse_file(path));
  } catch (const toml::parse_error& error) {
    std::ostringstream where;
    where << error.source().begin;
    TORCH_CHECK_VALUE(false, "'", path, "': ", error.description(), " (", where.str(), ")");
  } catch (const c10::ValueError& error) {
    TORCH_CHECK_VALUE(false, "'", path, "': ", error.what_without_backtrace());
  }
}

}  // namespace train
