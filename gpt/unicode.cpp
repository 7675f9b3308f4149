#include "gpt/unicode.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace gpt {
namespace {

constexpr uint32_t kCodePoints = 0x110000;

// Where the regex engine of tiktoken (Unicode 16) and PCRE2 (Unicode 14 in Debian 12) differ.
struct Correction {
  uint32_t first, last;
  CharClass kind;
};
constexpr auto kL = CharClass::kLetter;
constexpr auto kN = CharClass::kNumber;
constexpr Correction kCorrections[] = {
    {0x180e, 0x180e, CharClass::kOther},
    {0x1c89, 0x1c8a, kL},
    {0xa7cb, 0xa7cd, kL},
    {0xa7da, 0xa7dc, kL},
    {0x105c0, 0x105f3, kL},
    {0x10d40, 0x10d49, kN},
    {0x10d4a, 0x10d65, kL},
    {0x10d6f, 0x10d85, kL},
    {0x10ec2, 0x10ec4, kL},
    {0x1123f, 0x11240, kL},
    {0x11380, 0x11389, kL},
    {0x1138b, 0x1138b, kL},
    {0x1138e, 0x1138e, kL},
    {0x11390, 0x113b5, kL},
    {0x113b7, 0x113b7, kL},
    {0x113d1, 0x113d1, kL},
    {0x113d3, 0x113d3, kL},
    {0x116d0, 0x116e3, kN},
    {0x11bc0, 0x11be0, kL},
    {0x11bf0, 0x11bf9, kN},
    {0x11f02, 0x11f02, kL},
    {0x11f04, 0x11f10, kL},
    {0x11f12, 0x11f33, kL},
    {0x11f50, 0x11f59, kN},
    {0x1342f, 0x1342f, kL},
    {0x13441, 0x13446, kL},
    {0x13460, 0x143fa, kL},
    {0x16100, 0x1611d, kL},
    {0x16130, 0x16139, kN},
    {0x16d40, 0x16d6c, kL},
    {0x16d70, 0x16d79, kN},
    {0x18cff, 0x18cff, kL},
    {0x1b132, 0x1b132, kL},
    {0x1b155, 0x1b155, kL},
    {0x1ccf0, 0x1ccf9, kN},
    {0x1d2c0, 0x1d2d3, kN},
    {0x1df25, 0x1df2a, kL},
    {0x1e030, 0x1e06d, kL},
    {0x1e4d0, 0x1e4eb, kL},
    {0x1e4f0, 0x1e4f9, kN},
    {0x1e5d0, 0x1e5ed, kL},
    {0x1e5f0, 0x1e5f0, kL},
    {0x1e5f1, 0x1e5fa, kN},
    {0x2b739, 0x2b739, kL},
    {0x2ebf0, 0x2ee5d, kL},
    {0x31350, 0x323af, kL},
};

void append_utf8(std::string& text, uint32_t c) {
  const auto byte = [&](uint32_t bits) { text.push_back(static_cast<char>(bits)); };
  if (c < 0x80) {
    byte(c);
  } else if (c < 0x800) {
    byte(0xc0 | c >> 6), byte(0x80 | (c & 63));
  } else if (c < 0x10000) {
    byte(0xe0 | c >> 12), byte(0x80 | (c >> 6 & 63)), byte(0x80 | (c & 63));
  } else {
    byte(0xf0 | c >> 18), byte(0x80 | (c >> 12 & 63)), byte(0x80 | (c >> 6 & 63));
    byte(0x80 | (c & 63));
  }
}

// Calls mark(first byte, past the last byte) for every run of characters that match `pattern`.
template <typename Mark>
void for_each_match(const std::string& text, const char* pattern, Mark&& mark) {
  int error = 0;
  PCRE2_SIZE offset = 0;
  const std::unique_ptr<pcre2_code, decltype(&pcre2_code_free)> code(
      pcre2_compile(
          reinterpret_cast<PCRE2_SPTR>(pattern), PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP,
          &error, &offset, nullptr),
      pcre2_code_free);
  if (!code) throw std::runtime_error(std::string("PCRE2 cannot compile ") + pattern);
  pcre2_jit_compile(code.get(), PCRE2_JIT_COMPLETE);
  const std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> match(
      pcre2_match_data_create(1, nullptr), pcre2_match_data_free);
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  size_t at = 0;
  while (pcre2_match(
             code.get(), subject, text.size(), at, PCRE2_NO_UTF_CHECK, match.get(), nullptr) > 0) {
    const auto* bounds = pcre2_get_ovector_pointer(match.get());
    mark(bounds[0], bounds[1]);
    at = bounds[1];
  }
}

// The class of every code point: one scan of a text that holds them all, for each class.
std::vector<CharClass> make_table() {
  std::string all;
  std::vector<uint32_t> code_point_at;  // by byte
  for (uint32_t c = 0; c < kCodePoints; ++c) {
    if (c >= 0xd800 && c < 0xe000) continue;  // surrogates are no characters
    append_utf8(all, c);
    code_point_at.resize(all.size(), c);
  }
  std::vector<CharClass> table(kCodePoints, CharClass::kOther);
  const auto fill = [&](const char* pattern, CharClass kind) {
    for_each_match(all, pattern, [&](size_t first, size_t end) {
      for (size_t i = first; i < end; ++i) table[code_point_at[i]] = kind;
    });
  };
  fill("\\p{L}+", CharClass::kLetter);
  fill("\\p{N}+", CharClass::kNumber);
  fill("\\s+", CharClass::kSpace);
  for (const auto& [first, last, kind] : kCorrections) {
    for (uint32_t c = first; c <= last; ++c) table[c] = kind;
  }
  return table;
}

const CharClass* table() {
  static const std::vector<CharClass> classes = make_table();
  return classes.data();
}

bool is_continuation(unsigned char byte) { return (byte & 0xc0) == 0x80; }

}  // namespace

Char char_at(std::string_view text, size_t at) {
  static const CharClass* classes = table();
  const auto byte = [&](size_t i) -> uint32_t {
    return at + i < text.size() ? static_cast<unsigned char>(text[at + i]) : 0;
  };
  const uint32_t first = byte(0);
  if (first < 0x80) return {classes[first], 1};
  uint32_t c = 0;
  int length = 0;
  if (first >= 0xc2 && first < 0xe0) {
    c = (first & 31) << 6 | (byte(1) & 63), length = 2;
  } else if (first >= 0xe0 && first < 0xf0) {
    c = (first & 15) << 12 | (byte(1) & 63) << 6 | (byte(2) & 63), length = 3;
  } else if (first >= 0xf0 && first < 0xf5) {
    c = (first & 7) << 18 | (byte(1) & 63) << 12 | (byte(2) & 63) << 6 | (byte(3) & 63), length = 4;
  }
  for (int i = 1; i < length; ++i) {
    if (!is_continuation(byte(i))) return {};
  }
  const bool too_long = (length == 3 && c < 0x800) || (length == 4 && c < 0x10000);
  const bool surrogate = c >= 0xd800 && c < 0xe000;
  if (length == 0 || too_long || surrogate || c >= kCodePoints) return {};
  return {classes[c], length};
}

}  // namespace gpt
