#pragma once
// Reads TOML files. Errors name the file.

#include <c10/util/Exception.h>

#define TOML_EXCEPTIONS 1
// Some of what the parser asserts depends on the file ("[;]") and is reported as an error right after. Without NDEBUG the
// assertion would end the program; with it, clang would take it for true and may leave the error out.
#pragma push_macro("NDEBUG")
#undef NDEBUG
#define TOML_ASSERT(expression) static_cast<void>(0)
#include <toml++/toml.h>
#pragma pop_macro("NDEBUG")

#include <filesystem>
#include <sstream>
#include <string>

#include "gpt/files.h"

namespace train {

/// A string, number or boolean as text, in the form a flag would have. Throws for anything else, naming `name`.
std::string text_of(const toml::node& node, const std::string& name);

/// Returns use(the file's table). Errors in the file and in `use` start with the file's path.
template <typename Use>
auto read_toml(const std::string& path, Use&& use) {
  TORCH_CHECK_VALUE(std::filesystem::is_regular_file(path), "there is no file '", path, "'");
  try {
    constexpr size_t kLargest = size_t{16} << 20;
    return use(toml::parse(gpt::read_whole(path, kLargest)));
  } catch (const toml::parse_error& error) {
    std::ostringstream where;
    where << error.source().begin;
    TORCH_CHECK_VALUE(false, "'", path, "': ", error.description(), " (", where.str(), ")");
  } catch (const c10::ValueError& error) {
    TORCH_CHECK_VALUE(false, "'", path, "': ", error.what_without_backtrace());
  }
}

}  // namespace train
