#include "train/toml_file.h"

#include <algorithm>
#include <filesystem>
#include <sstream>

#include "gpt/files.h"

namespace train {
namespace {

constexpr size_t kLargest = size_t{16} << 20;

// What may precede a string.
constexpr std::string_view kBeforeString = " \t\r\n=[,{";

bool is_ascii(char c) { return static_cast<unsigned char>(c) < 0x80; }

void refuse(std::string_view text, size_t at) {
  const auto line = 1 + std::count(text.begin(), text.begin() + static_cast<int64_t>(at), '\n');
  TORCH_CHECK_VALUE(
      false,
      "a character that is not ASCII is only allowed in comments and strings, and there not "
      "after a backslash (line ",
      line, ")");
}

// End of the string that begins at `at`. One that is not closed ends with its line, or with the text.
size_t end_of_string(std::string_view text, size_t at) {
  const char quote = text[at];
  const std::string quotes(3, quote);
  const bool long_form = text.substr(at, 3) == quotes;
  size_t i = at + (long_form ? 3 : 1);
  while (i < text.size()) {
    if (quote == '"' && text[i] == '\\') {
      const size_t next = text.find_first_not_of(" \t\r\n", i + 1);
      if (long_form && next < text.size() && !is_ascii(text[next])) refuse(text, next);
      i += 2;
    } else if (!long_form && (text[i] == quote || text[i] == '\n')) {
      return i + 1;
    } else if (long_form && text.substr(i, 3) == quotes) {
      // Up to two quotes may precede the three that close it.
      return std::min({i + 5, text.find_first_not_of(quote, i), text.size()});
    } else {
      ++i;
    }
  }
  return text.size();
}

// The library's test for blanks is undefined for most other characters. It only takes place where TOML allows ASCII
// alone, and after a backslash in a long string.
void check_characters(std::string_view text) {
  const std::string_view mark = "\xef\xbb\xbf";
  for (size_t i = text.starts_with(mark) ? mark.size() : 0; i < text.size();) {
    if (text[i] == '#') {
      i = std::min(text.find('\n', i), text.size());
    } else if (text[i] == '"' || text[i] == '\'') {
      // Where no string can begin, the library looks at what follows without taking it for one.
      const bool begins = i == 0 || kBeforeString.find(text[i - 1]) != std::string_view::npos;
      const size_t end = end_of_string(text, i);
      const auto inside = text.substr(i, end - i);
      if (!begins && !std::all_of(inside.begin(), inside.end(), is_ascii)) refuse(text, i);
      i = end;
    } else {
      if (!is_ascii(text[i])) refuse(text, i);
      ++i;
    }
  }
}

}  // namespace

toml::table parse_toml_file(const std::string& path) {
  TORCH_CHECK_VALUE(std::filesystem::is_regular_file(path), "there is no file '", path, "'");
  try {
    const std::string text = gpt::read_whole(path, kLargest);
    check_characters(text);
    return toml::parse(text, path);
  } catch (const toml::parse_error& error) {
    std::ostringstream where;
    where << error.source().begin;
    TORCH_CHECK_VALUE(false, "'", path, "': ", error.description(), " (", where.str(), ")");
  } catch (const c10::ValueError& error) {
    TORCH_CHECK_VALUE(false, "'", path, "': ", error.what_without_backtrace());
  }
}

}  // namespace train
