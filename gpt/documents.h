#pragma once
// Text files, read in pieces: cut into documents, and documents into parts that can be encoded one by one.

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace gpt {

/// A part of a document. Tokens of the parts, in order, are the tokens of the document.
struct TextPart {
  std::string_view text;
  bool starts_document;
  const std::string* file;  // its input
  int64_t offset;           // its place there
};
using TakePart = std::function<void(const TextPart&)>;

/// The text files of the inputs (see CorpusOptions), in order.
std::vector<std::string> text_files(const std::vector<std::string>& inputs);

/// Calls take(part) for all documents of a file, or of standard input ("-"), except those of blanks alone.
void for_each_part(const std::string& file, const TakePart& take);

/// The same for `size` bytes of a file, beginning at `offset`, that are one document.
void for_each_part(const std::string& file, int64_t offset, int64_t size, const TakePart& take);

}  // namespace gpt
