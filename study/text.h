#pragma once
// Formatting of numbers.

#include <cstdio>
#include <string>

namespace study {

/// Formats like printf, without a length limit.
template <typename... Values>
std::string format(const char* pattern, Values... values) {
  const int size = std::snprintf(nullptr, 0, pattern, values...);
  std::string text(static_cast<size_t>(size), '\0');
  std::snprintf(text.data(), text.size() + 1, pattern, values...);
  return text;
}

}  // namespace study
