#include "gpt/documents.h"

#include <algorithm>
#include <filesystem>
#include <stdexcept>

#include "gpt/files.h"
#include "gpt/unicode.h"

namespace gpt {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kEndOfText = "<|endoftext|>";
constexpr size_t kReadBytes = size_t{1} << 20;
constexpr size_t kPartBytes = size_t{1} << 19;     // a part is cut at the first chance after this
constexpr size_t kLongestPart = size_t{64} << 20;  // without a chance to cut, it is not text

// Class of the character that ends before `at`.
CharClass class_before(std::string_view text, size_t at) {
  const auto continues = [&](size_t i) {
    return (static_cast<unsigned char>(text[i]) & 0xc0) == 0x80;
  };
  size_t begin = at - 1;
  while (begin > 0 && at - begin < 4 && continues(begin)) --begin;
  const auto c = char_at(text, begin);
  return begin + static_cast<size_t>(c.length) == at ? c.kind : CharClass::kOther;
}

// Whether a piece of the tokenizer ends before `at`, whatever comes before and after: a blank follows something else, or
// letters, numbers and other signs meet. Only an apostrophe may form a piece with letters that follow.
bool can_cut(std::string_view text, size_t at) {
  const auto after = char_at(text, at).kind;
  const auto before = class_before(text, at);
  if (before == CharClass::kSpace || before == after) return false;
  return text[at - 1] != '\'' || after != CharClass::kLetter;
}

// Cuts a text that arrives in pieces into documents and parts.
class Splitter {
 public:
  Splitter(const std::string& file, int64_t offset, bool separators, const TakePart& take)
      : file_(file), offset_(offset), separators_(separators), take_(take) {}

  void feed(std::string_view piece);
  void end();

 private:
  void find_separators(bool at_end);
  void cut_parts();
  void emit(size_t end);
  void end_document(size_t end);
  size_t settled() const;

  const std::string& file_;
  int64_t offset_;  // of text_ in the file
  bool separators_;
  const TakePart& take_;
  std::string text_;      // not yet emitted, with what was since the last feed()
  size_t begin_ = 0;      // what is not yet emitted
  bool emitted_ = false;  // whether a part of the current document was
  size_t line_ = 0;       // where the last line begins
  size_t searched_ = 0;   // for line ends
  size_t uncut_ = 0;      // where the search for a cut goes on
};

void Splitter::feed(std::string_view piece) {
  text_ += piece;
  if (separators_) find_separators(/*at_end=*/false);
  cut_parts();
  text_.erase(0, begin_);
  offset_ += static_cast<int64_t>(begin_);
  // A line of which a part was emitted is no separator, whatever the rest of it looks like.
  line_ = line_ < begin_ ? std::string::npos : line_ - begin_;
  searched_ -= std::min(searched_, begin_);
  uncut_ -= std::min(uncut_, begin_);
  begin_ = 0;
  if (text_.size() <= kLongestPart) return;
  throw std::runtime_error(
      "'" + file_ + "', near byte " + std::to_string(offset_) +
      ": more than 64 MiB of nothing but letters, digits, signs or blanks; is it text?");
}

void Splitter::end() {
  if (separators_) find_separators(/*at_end=*/true);
  end_document(text_.size());
}

void Splitter::find_separators(bool at_end) {
  for (;;) {
    const size_t found = text_.find('\n', searched_);
    const size_t end = std::min(found, text_.size());
    searched_ = end;
    if (found == std::string::npos && !at_end) return;
    const size_t next = std::min(end + 1, text_.size());
    if (line_ <= end) {
      auto line = std::string_view(text_).substr(line_, end - line_);
      if (line.ends_with('\r')) line.remove_suffix(1);
      if (line == kEndOfText) {
        end_document(line_);
        begin_ = uncut_ = next;
      }
    }
    line_ = searched_ = next;
    if (found == std::string::npos) return;
  }
}

// Text up to here cannot become a separator when more arrives.
size_t Splitter::settled() const {
  if (!separators_ || line_ > text_.size()) return text_.size();
  auto rest = std::string_view(text_).substr(line_);
  if (rest.size() > kEndOfText.size() && rest.ends_with('\r')) rest.remove_suffix(1);
  return kEndOfText.starts_with(rest) ? line_ : text_.size();
}

void Splitter::cut_parts() {
  // The last character may lack up to three bytes.
  const size_t end = std::min(settled(), text_.size() - std::min<size_t>(3, text_.size()));
  for (uncut_ = std::max(uncut_, begin_ + kPartBytes); uncut_ < end; ++uncut_) {
    if (!can_cut(text_, uncut_)) continue;
    emit(uncut_);
    uncut_ = begin_ + kPartBytes - 1;
  }
}

void Splitter::emit(size_t end) {
  const auto part = std::string_view(text_).substr(begin_, end - begin_);
  take_({part, !emitted_, &file_, offset_ + static_cast<int64_t>(begin_)});
  emitted_ = true;
  begin_ = end;
}

void Splitter::end_document(size_t end) {
  const auto rest = std::string_view(text_).substr(begin_, end - begin_);
  // What was emitted was not blank: a cut comes after something else.
  const bool blank = rest.find_first_not_of(" \t\r\n") == std::string_view::npos;
  if (emitted_ ? !rest.empty() : !blank) {
    while (end - begin_ > kPartBytes) {  // a long document that arrived in one piece
      size_t at = begin_ + kPartBytes;
      while (at < end && !can_cut(text_, at)) ++at;
      emit(at);
    }
    if (begin_ < end) emit(end);
  }
  emitted_ = false;
}

[[noreturn]] void fail(const std::string& path, const std::error_code& error) {
  throw std::runtime_error("'" + path + "' cannot be read: " + error.message());
}

std::vector<std::string> texts_in(const std::string& folder) {
  std::vector<std::string> files;
  std::error_code error;
  for (fs::recursive_directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    if (entry->path().extension() == ".txt" && entry->is_regular_file(error)) {
      files.push_back(entry->path().string());
    }
  }
  if (error) fail(folder, error);
  if (files.empty()) throw std::runtime_error("'" + folder + "' contains no .txt files");
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace

std::vector<std::string> text_files(const std::vector<std::string>& inputs) {
  std::vector<std::string> files;
  for (const auto& input : inputs) {
    std::error_code error;
    const auto status = fs::status(input, error);
    if (input == "-" || fs::is_regular_file(status)) {
      files.push_back(input);
    } else if (fs::is_directory(status)) {
      const auto inside = texts_in(input);
      files.insert(files.end(), inside.begin(), inside.end());
    } else if (error && status.type() == fs::file_type::none) {
      fail(input, error);
    } else {
      throw std::runtime_error("'" + input + "' is neither a file nor a folder");
    }
  }
  return files;
}

void for_each_part(const std::string& path, const TakePart& take) {
  InputFile file(path);
  Splitter splitter(path, 0, /*separators=*/true, take);
  std::string piece(kReadBytes, '\0');
  for (size_t got = kReadBytes; got == kReadBytes;) {
    got = file.read(piece.data(), piece.size());
    splitter.feed(std::string_view(piece).substr(0, got));
  }
  splitter.end();
}

void for_each_part(const std::string& path, int64_t offset, int64_t size, const TakePart& take) {
  const InputFile file(path);
  Splitter splitter(path, offset, /*separators=*/false, take);
  std::string piece(kReadBytes, '\0');
  for (int64_t done = 0; done < size;) {
    const auto wanted = static_cast<size_t>(std::min<int64_t>(kReadBytes, size - done));
    const size_t got = file.read_at(offset + done, piece.data(), wanted);
    if (got < wanted) {
      throw std::runtime_error("'" + path + "' became shorter while it was read; start again");
    }
    splitter.feed(std::string_view(piece).substr(0, got));
    done += static_cast<int64_t>(got);
  }
  splitter.end();
}

}  // namespace gpt
