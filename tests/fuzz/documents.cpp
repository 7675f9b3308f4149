// Texts: cut into documents, and documents into pieces.

#include "gpt/documents.h"

#include "gpt/tokenizer.h"
#include "harness.h"

namespace {

// The documents of a text, line by line.
std::vector<std::string> documents_of(const std::string& text) {
  std::vector<std::string> documents(1);
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size() - 1) + 1;
    std::string line = text.substr(at, end - at);
    at = end;
    std::string bare = line;
    if (bare.ends_with('\n')) bare.pop_back();
    if (bare.ends_with('\r')) bare.pop_back();
    if (bare == "<|endoftext|>") {
      documents.emplace_back();
    } else {
      documents.back() += line;
    }
  }
  std::erase_if(documents, [](const std::string& document) {
    return document.find_first_not_of(" \t\r\n") == std::string::npos;
  });
  return documents;
}

void check_pieces(const std::string& text) {
  for (size_t at = 0; at < text.size();) {
    const size_t length = gpt::piece_length(text, at);
    fuzz::require(length > 0 && length <= text.size() - at, "a piece ends outside the text");
    at += length;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const std::string text = input.rest();
  const std::string path = fuzz::write(fuzz::empty_folder(), "text.txt", text);
  std::vector<std::string> documents;
  gpt::for_each_part(path, [&](const gpt::TextPart& part) {
    if (part.starts_document) documents.emplace_back();
    documents.back() += part.text;
    fuzz::require(text.substr(part.offset, part.text.size()) == part.text, "a part is elsewhere");
  });
  fuzz::require(documents == documents_of(text), "documents differ from the lines between them");
  check_pieces(text);
  return 0;
}
