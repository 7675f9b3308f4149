#pragma once
// The words of a command line, checked before they are parsed, and checks of single values. Errors are in our words.

#include <CLI/CLI.hpp>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace cli {

/// A command line that makes no sense.
struct WrongUse : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The type_name of an option whose value may look like a flag.
constexpr const char* kAnyText = "ANY-TEXT";

/// The words after the program's name, first to last. Throws for an option without its value (the next flag is never
/// taken for one), an option given twice, and an empty value, unless the option's help says what "empty:" means. Gives
/// options that may go without a value the value true.
std::vector<std::string> checked_words(const CLI::App& app, int argc, char** argv);

/// What is wrong with a command line, from the parser's error.
std::string words_of(const CLI::ParseError& error, const CLI::App& app);

/// Checks of a value.
CLI::Validator whole_number(int64_t least, int64_t most);
CLI::Validator number_above_zero();
CLI::Validator one_of(const std::vector<std::string>& choices);

}  // namespace cli
