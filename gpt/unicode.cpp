#include "gpt/unicode.h"

#include <utf8proc.h>

#include <vector>

namespace gpt {
namespace {

constexpr utf8proc_int32_t kCodePoints = 0x110000;

// Code points that are new in Unicode 16, which tiktoken's regex engine has, since 14, which utf8proc 2.7 has.
struct Correction {
  utf8proc_int32_t first, last;
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

CharClass class_of(utf8proc_int32_t c) {
  if ((c >= '\t' && c <= '\r') || c == 0x85) return CharClass::kSpace;
  switch (utf8proc_category(c)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
      return CharClass::kLetter;
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO:
      return CharClass::kNumber;
    case UTF8PROC_CATEGORY_ZS:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
      return CharClass::kSpace;
    default:
      return CharClass::kOther;
  }
}

std::vector<CharClass> make_table() {
  std::vector<CharClass> table(kCodePoints);
  for (utf8proc_int32_t c = 0; c < kCodePoints; ++c) table[c] = class_of(c);
  for (const auto& [first, last, kind] : kCorrections) {
    for (auto c = first; c <= last; ++c) table[c] = kind;
  }
  return table;
}

}  // namespace

Char char_at(std::string_view text, size_t at) {
  static const std::vector<CharClass> classes = make_table();
  const auto* from = reinterpret_cast<const utf8proc_uint8_t*>(text.data()) + at;
  if (*from < 0x80) return {classes[*from], 1};
  utf8proc_int32_t c = 0;
  const auto length = utf8proc_iterate(from, static_cast<utf8proc_ssize_t>(text.size() - at), &c);
  if (length <= 0) return {};  // not UTF-8
  return {classes[c], static_cast<int>(length)};
}

}  // namespace gpt
