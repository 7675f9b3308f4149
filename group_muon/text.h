#pragma once
// Helpers for the short texts that describe groupings, layouts and options.

#include <c10/util/Exception.h>

#include <charconv>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace group_muon {

/// "a,b,c" → {"a", "b", "c"}. Keeps empty parts; the caller can reject them.
inline std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (;;) {
    const auto end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

/// "a@b" cut at the first '@' → {"a", "b"}; the second is empty if there is no '@'.
inline std::pair<std::string_view, std::string_view> cut(std::string_view text, char separator) {
  const auto at = text.find(separator);
  if (at == std::string_view::npos) return {text, {}};
  return {text.substr(0, at), text.substr(at + 1)};
}

/// Parses a non-negative integer. The error quotes `whole`, the text that contains it.
inline int64_t parse_number(std::string_view digits, std::string_view whole) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  TORCH_CHECK_VALUE(
      error == std::errc() && end == digits.data() + digits.size() && value >= 0, "group_muon: '",
      digits, "' in '", whole, "' should be a whole number, 0 or more");
  return value;
}

/// Parses a finite number, 0 or more. The error quotes `whole`, the text that contains it.
inline double parse_real(std::string_view digits, std::string_view whole) {
  double value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  TORCH_CHECK_VALUE(
      error == std::errc() && end == digits.data() + digits.size() && value >= 0 &&
          std::isfinite(value),
      "group_muon: '", digits, "' in '", whole, "' should be a number, 0 or more");
  return value;
}

inline std::vector<int64_t> parse_numbers(
    std::string_view list, char separator, std::string_view whole) {
  std::vector<int64_t> values;
  for (const auto part : split(list, separator)) values.push_back(parse_number(part, whole));
  return values;
}

inline std::string join(const std::vector<int64_t>& values, const char* separator) {
  std::string text;
  for (const auto value : values) {
    if (!text.empty()) text += separator;
    text += std::to_string(value);
  }
  return text;
}

/// The shortest text that is read as the same number. Zero has no sign.
template <typename Number>
std::string to_text(Number value) {
  char digits[32];
  const auto [end, error] =
      std::to_chars(digits, digits + sizeof digits, value == 0 ? Number{0} : value);
  return {digits, end};
}

/// The candidate that ends with the name (muon-lr for lr), else the one with the smallest edit distance, or "" if none
/// is close.
std::string nearest(std::string_view name, const std::vector<std::string>& candidates);

}  // namespace group_muon
