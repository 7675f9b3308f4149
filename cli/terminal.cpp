#include "cli/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace cli {
namespace {

constexpr int kWidestBar = 30;
bool live = false;

int columns() {
  winsize size{};
  if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

// "[=======>      ]" for a fraction from 0 to 1.
std::string bar(double fraction, int width) {
  const int filled = static_cast<int>(std::clamp(fraction, 0.0, 1.0) * width);
  std::string text = "[";
  text.append(filled, '=');
  if (filled < width) text.append(1, '>').append(width - filled - 1, ' ');
  text += ']';
  return text;
}

}  // namespace

void show_live(double fraction, const std::string& text) {
  if (isatty(STDERR_FILENO) == 0) return;
  const int room = columns() - 1;
  const int width = std::min(kWidestBar, room - static_cast<int>(text.size()) - 3);
  std::string line = width >= 4 ? bar(fraction, width) + " " + text : text;
  if (line.size() > static_cast<size_t>(room)) line.resize(room);
  std::fprintf(stderr, "\r\033[2K%s", line.c_str());
  std::fflush(stderr);
  live = true;
}

void say(const std::string& line) {
  if (live) std::fputs("\r\033[2K", stderr);
  live = false;
  std::fprintf(stdout, "%s\n", line.c_str());
  std::fflush(stdout);
}

void end_live() {
  if (!live) return;
  std::fputc('\n', stderr);
  live = false;
}

std::string shell_word(const std::string& path) {
  const auto plain = [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '/' || c == '.' || c == '-' || c == '_' || c >= 0x80;
  };
  if (!path.empty() && std::all_of(path.begin(), path.end(), plain)) return path;
  std::string text = "'";
  for (const char c : path) {
    if (c == '\'') {
      text += "'\\''";
    } else {
      text += c;
    }
  }
  return text += '\'';
}

}  // namespace cli
