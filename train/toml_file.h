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

#include <string>

namespace train {

/// A string, number or boolean as text, in the form a flag would have. Throws for anything else, naming `name`.
std::string text_of(const toml::node& node, const std::string& name);

/// The table of a file of at most 16 MB.
toml::table parse_toml_file(const std::string& path);

/// Returns use(the file's table). Errors in the file and in `use` start with the file's path.
template <typename Use>
auto read_toml(const std::string& path, Use&& use) {
  const toml::table table = parse_toml_file(path);
  try {
    return use(table);
  } catch (const c10::ValueError& error) {
    TORCH_CHECK_VALUE(false, "'", path, "': ", error.what_without_backtrace());
  }
}

}  // namespace train
