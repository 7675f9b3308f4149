#include "cli/terminal.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace cli {
namespace {

bool live = false;

}  // namespace

bool is_live() { return isatty(STDERR_FILENO) != 0; }

void say(const std::string& line) {
  if (live) std::fputs("\r\033[2K", stderr);
  live = false;
  std::fprintf(stdout, "%s\n", line.c_str());
  std::fflush(stdout);
}

void show_live(const std::string& line) {
  if (!is_live()) return;
  std::fprintf(stderr, "\r\033[2K%s", line.c_str());
  std::fflush(stderr);
  live = true;
}

void end_live() {
  if (!live) return;
  std::fputc('\n', stderr);
  live = false;
}

std::string bar(double fraction, int width) {
  const int filled = static_cast<int>(std::clamp(fraction, 0.0, 1.0) * width);
  std::string text = "[";
  text.append(filled, '=');
  if (filled < width) text.append(1, '>').append(width - filled - 1, ' ');
  text += ']';
  return text;
}

}  // namespace cli
