#pragma once
// One live line on a terminal, plain lines elsewhere.

#include <string>

namespace cli {

/// Shows "[=======>      ] text" on standard error, replacing the last live line. Silent if that is not a terminal.
/// The bar takes the space that the text leaves.
void show_live(double fraction, const std::string& text);
/// Prints a line on standard output, clearing the live line first.
void say(const std::string& line);
/// Ends the live line, if there is one.
void end_live();

/// A path, quoted for the shell if necessary.
std::string shell_word(const std::string& path);

}  // namespace cli
