#pragma once
// One live line on a terminal; nothing but the last state elsewhere.

#include <string>

namespace cli {

/// Rewrites the line on standard error if it is a terminal; silent otherwise.
void show_live(const std::string& line);
/// Whether there is a terminal for live lines.
bool is_live();
/// A line that stays, on standard output; the live line makes room for it.
void say(const std::string& line);
/// Ends the live line, if there is one.
void end_live();

/// "[=======>      ]" for a fraction in 0 … 1.
std::string bar(double fraction, int width = 30);

}  // namespace cli
