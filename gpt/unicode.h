#pragma once
// Unicode as GPT-2's pre-tokenizer sees it: letters, numbers, white space, everything else.

#include <cstdint>
#include <string_view>

namespace gpt {

enum class CharClass : uint8_t { kOther, kLetter, kNumber, kSpace };

/// A character's class and length in bytes. A byte that is not part of valid UTF-8 counts as one character of class
/// kOther.
struct Char {
  CharClass kind = CharClass::kOther;
  int length = 1;
};

/// The character that starts at `text[at]`.
Char char_at(std::string_view text, size_t at);

}  // namespace gpt
