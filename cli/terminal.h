#pragma once
// One live line on a terminal; nothing but the last state elsewhere.

#include <string>

namespace cli {

/// "[=======>      ] text", rewritten on standard error if that is a terminal; silent otherwise. The
/// bar takes the room that the text leaves.
void show_live(double fraction, const std::string& text);
/// A line that stays, on standard output; the live line makes room for it.
void say(const std::string& line);
/// Ends the live line, if there is one.
void end_live();

/// A path as a shell takes it.
std::string shell_word(const std::string& path);

}  // namespace cli
