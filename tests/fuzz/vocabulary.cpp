// Vocabularies in both formats, and texts encoded with them.

#include "gpt/tokenizer.h"
#include "harness.h"

namespace {

// The 256 single bytes, which every vocabulary begins with.
const std::string& single_bytes() {
  static const std::string text = [] {
    std::vector<std::string> tokens;
    for (int byte = 0; byte < 256; ++byte) tokens.emplace_back(1, static_cast<char>(byte));
    return gpt::Vocabulary(tokens).to_tiktoken();
  }();
  return text;
}

void check_encoding(const gpt::Vocabulary& vocabulary, const std::string& text) {
  std::vector<uint32_t> ids;
  gpt::Encoder(vocabulary).encode(text, ids);
  std::string decoded;
  for (const uint32_t id : ids) {
    fuzz::require(id < vocabulary.end_of_text(), "a text has no such id");
    decoded += vocabulary.token(id);
  }
  fuzz::require(decoded == text, "ids stand for another text");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const int64_t kind = input.number(2);
  const std::string text = input.part();
  const auto check = [&] {
    const auto vocabulary = kind == 0 ? gpt::Vocabulary::parse_tiktoken(text, "the file")
                            : kind == 1
                                ? gpt::Vocabulary::parse_tiktoken(single_bytes() + text, "the file")
                                : gpt::Vocabulary::parse_merges(text, "the file");
    const std::string written = vocabulary.to_tiktoken();
    const auto again = gpt::Vocabulary::parse_tiktoken(written, "");
    fuzz::require(again.to_tiktoken() == written, "another vocabulary is read again");
    check_encoding(vocabulary, input.rest());
    check_encoding(vocabulary, text);
  };
  fuzz::accepted(input, check, "the file");
  return 0;
}
