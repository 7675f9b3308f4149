#include "gpt/shards.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>
#include <filesystem>
#include <map>
#include <stdexcept>

#include "gpt/files.h"

namespace gpt {
namespace {

constexpr int32_t kMagic = 20240520;
constexpr int32_t kVersion = 1;
using Header = std::array<int32_t, 256>;
constexpr size_t kHeaderBytes = sizeof(Header);

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw std::runtime_error("'" + path + "' " + what);
}

// Whether `name` contains `word` with no letter right before or after it.
bool has_word(const std::string& name, const std::string& word) {
  const auto is_letter = [&](size_t at) {
    return at < name.size() && std::isalpha(static_cast<unsigned char>(name[at])) != 0;
  };
  for (size_t at = name.find(word); at != std::string::npos; at = name.find(word, at + 1)) {
    if (!is_letter(at - 1) && !is_letter(at + word.size())) return true;
  }
  return false;
}

// The shards of a split in a folder, sorted by name.
std::vector<std::string> shards_of(const std::string& folder, const std::string& split) {
  std::vector<std::string> names;
  if (!std::filesystem::exists(folder)) fail(folder, "cannot be read: there is no such folder");
  for (auto& name : names_in(folder)) {
    const std::filesystem::path path = std::filesystem::path(folder) / name;
    if (!has_word(name, split) || path.extension() != ".bin") continue;
    std::error_code missing;
    if (!std::filesystem::is_regular_file(path, missing)) fail(path.string(), "is not a file");
    names.push_back(std::move(name));
  }
  if (names.empty()) {
    fail(
        folder, "has no *" + split + "*.bin shard; make some with 'group-muon tokenize'" +
                    (split == "val" ? " --validation or --validation-fraction" : ""));
  }
  return names;
}

std::map<std::string, ShardRecord> records_of(const Manifest& manifest, const std::string& split) {
  std::map<std::string, ShardRecord> records;
  for (const auto& record : manifest.shards) {
    if (has_word(record.name, split)) records[record.name] = record;
  }
  return records;
}

// A pseudorandom permutation of [0, n), one index at a time: a four-round Feistel network over the next power of
// four, applied repeatedly until the value falls in range.
int64_t permuted(int64_t index, int64_t n, uint64_t key) {
  int half = 1;
  while ((int64_t{1} << (2 * half)) < n) ++half;
  const uint64_t mask = (uint64_t{1} << half) - 1;
  auto value = static_cast<uint64_t>(index);
  do {
    uint64_t left = value >> half, right = value & mask;
    for (uint64_t round = 0; round < 4; ++round) {
      uint64_t mixed = (right + key) * 0x9e3779b97f4a7c15ULL + round * 0xd6e8feb86659fd93ULL;
      mixed = (mixed ^ (mixed >> 29)) * 0xbf58476d1ce4e5b9ULL;
      mixed ^= mixed >> 32;
      const uint64_t next = left ^ (mixed & mask);
      left = right;
      right = next;
    }
    value = left << half | right;
  } while (value >= static_cast<uint64_t>(n));
  return static_cast<int64_t>(value);
}

}  // namespace

struct ShardWriter::Shard {
  explicit Shard(const std::string& path) : file(path) {}
  OutputFile file;
  ShardRecord record = {};
  std::vector<uint16_t> block = {};  // tokens not yet written, at most kBlockTokens
};

ShardWriter::ShardWriter(std::string folder, std::string split, int64_t shard_tokens)
    : folder_(std::move(folder)), split_(std::move(split)), shard_tokens_(shard_tokens) {
  if (shard_tokens_ < 1 || shard_tokens_ > INT32_MAX) {
    throw std::runtime_error(
        "a shard should have 1 to 2147483647 tokens, not " + std::to_string(shard_tokens_));
  }
}

ShardWriter::ShardWriter(ShardWriter&&) noexcept = default;
ShardWriter::~ShardWriter() = default;

void ShardWriter::open() {
  char number[32];
  std::snprintf(number, sizeof number, "_%06zu.bin", written_.size());
  const std::string name = split_ + number;
  shard_ = std::make_unique<Shard>(folder_ + "/" + name);
  shard_->record.name = name;
  shard_->file.write(Header{}.data(), kHeaderBytes);  // close() writes the real one
}

void ShardWriter::flush() {
  auto& [file, record, block] = *shard_;
  if (block.empty()) return;
  record.crcs.push_back(crc32c(0, block.data(), 2 * block.size()));
  file.write(block.data(), 2 * block.size());
  block.clear();
}

void ShardWriter::close() {
  flush();
  const Header header = {kMagic, kVersion, static_cast<int32_t>(shard_->record.tokens)};
  shard_->file.write_at(0, header.data(), kHeaderBytes);
  shard_->file.close();
  written_.push_back(std::move(shard_->record));
  shard_ = nullptr;
}

void ShardWriter::write(const std::vector<uint32_t>& tokens) {
  for (size_t at = 0; at < tokens.size();) {
    if (!shard_) open();
    auto& [file, record, block] = *shard_;
    const auto room = static_cast<size_t>(
        std::min(shard_tokens_ - record.tokens, kBlockTokens - static_cast<int64_t>(block.size())));
    const size_t count = std::min(room, tokens.size() - at);
    block.insert(block.end(), tokens.data() + at, tokens.data() + at + count);
    record.tokens += static_cast<int64_t>(count);
    at += count;
    if (static_cast<int64_t>(block.size()) == kBlockTokens) flush();
    if (record.tokens == shard_tokens_) close();
  }
}

std::vector<ShardRecord> ShardWriter::finish() {
  if (shard_) close();
  return std::move(written_);
}

struct TokenStream::File {
  File(const std::string& path, int64_t first_token);
  void compare_with(const ShardRecord& record);
  /// Tokens `offset` to `offset + count`, which must be there.
  void read(int64_t offset, int64_t count, std::vector<uint16_t>& out) const;
  /// The same, after comparing every block it touches with the manifest, once.
  void read_checked(int64_t offset, int64_t count, std::vector<uint16_t>& out) const;

  InputFile file;
  InputFile::Stamp stamp;
  int64_t first, count = 0;
  std::vector<uint32_t> crcs = {};         // the manifest's, or empty
  mutable std::vector<bool> checked = {};  // blocks compared with them
};

TokenStream::File::File(const std::string& path, int64_t first_token)
    : file(path), stamp(file.stamp()), first(first_token) {
  Header header{};
  if (file.read_at(0, header.data(), kHeaderBytes) < kHeaderBytes) {
    fail(path, "is shorter than a shard's header");
  }
  if (header[0] != kMagic) {
    fail(
        path, "is not a token shard (its magic number is " + std::to_string(header[0]) +
                  ", not 20240520)");
  }
  if (header[1] != kVersion) {
    fail(
        path,
        "is a shard of version " + std::to_string(header[1]) + "; only version 1 is supported");
  }
  count = header[2];
  const int64_t bytes = stamp.bytes - static_cast<int64_t>(kHeaderBytes);
  if (bytes != 2 * count) {
    fail(
        path, std::string(bytes < 2 * count ? "is truncated" : "is too long") +
                  ": its header says " + std::to_string(count) + " tokens, but it holds " +
                  std::to_string(bytes / 2) + remedy());
  }
}

void TokenStream::File::compare_with(const ShardRecord& record) {
  if (count != record.tokens) {
    fail(
        file.path(), "holds " + std::to_string(count) + " tokens, but the manifest says " +
                         std::to_string(record.tokens) + remedy());
  }
  crcs = record.crcs;
  checked.assign(crcs.size(), false);
}

void TokenStream::File::read(int64_t offset, int64_t tokens, std::vector<uint16_t>& out) const {
  out.resize(static_cast<size_t>(tokens));
  const size_t bytes = 2 * out.size();
  const size_t got =
      file.read_at(static_cast<int64_t>(kHeaderBytes) + 2 * offset, out.data(), bytes);
  // A write changes the time first and the content after that, so the time is looked at last.
  if (got < bytes || file.stamp() != stamp) {
    fail(
        file.path(),
        "was changed while it was in use; restore it, or make the data again with "
        "'group-muon tokenize --overwrite', which does not disturb a running training");
  }
}

void TokenStream::File::read_checked(
    int64_t offset, int64_t tokens, std::vector<uint16_t>& out) const {
  for (int64_t block = offset / kBlockTokens;
       !crcs.empty() && block * kBlockTokens < offset + tokens; ++block) {
    if (checked[block]) continue;
    const int64_t begin = block * kBlockTokens;
    read(begin, std::min(kBlockTokens, count - begin), out);
    if (crc32c(0, out.data(), 2 * out.size()) != crcs[block]) {
      fail(
          file.path(), "is damaged: its tokens from position " + std::to_string(begin) +
                           " on differ from the manifest's checksum" + remedy());
    }
    checked[block] = true;
  }
  read(offset, tokens, out);
}

TokenStream::TokenStream(const std::string& folder, const std::string& split, int64_t vocabulary)
    : vocabulary_(vocabulary) {
  const auto names = shards_of(folder, split);
  const auto manifest = read_manifest(folder);
  has_manifest_ = manifest.has_value();
  if (manifest && manifest->vocabulary > vocabulary) {
    fail(
        folder, "was made with a vocabulary of " + std::to_string(manifest->vocabulary) +
                    " entries, but the model's vocabulary is " + std::to_string(vocabulary) +
                    "; remove --vocabulary to use the data's");
  }
  const auto records =
      manifest ? records_of(*manifest, split) : std::map<std::string, ShardRecord>();
  for (const auto& [name, record] : records) {
    if (std::find(names.begin(), names.end(), name) == names.end()) {
      fail(folder, "lacks '" + name + "', which its manifest lists" + remedy());
    }
  }
  for (const auto& name : names) {
    files_.emplace_back((std::filesystem::path(folder) / name).string(), size_);
    size_ += files_.back().count;
    if (!manifest) continue;
    const auto record = records.find(name);
    if (record == records.end()) {
      fail(folder, "has a shard '" + name + "' that its manifest does not list; remove it");
    }
    files_.back().compare_with(record->second);
  }
}

TokenStream::TokenStream(TokenStream&&) noexcept = default;
TokenStream::~TokenStream() = default;

void TokenStream::read(int64_t position, int64_t count, int64_t* out) const {
  auto file = std::upper_bound(
      files_.begin(), files_.end(), position,
      [](int64_t at, const File& other) { return at < other.first + other.count; });
  std::vector<uint16_t> tokens;
  while (count > 0) {
    if (file == files_.end()) throw std::runtime_error("read past the end of the token stream");
    const int64_t offset = position - file->first;
    const int64_t here = std::min(count, file->count - offset);
    file->read_checked(offset, here, tokens);
    for (int64_t i = 0; i < here; ++i) {
      out[i] = tokens[i];
      if (out[i] >= vocabulary_) {
        fail(
            file->file.path(), "holds token " + std::to_string(out[i]) + " at position " +
                                   std::to_string(offset + i) + ", but the vocabulary size is " +
                                   std::to_string(vocabulary_));
      }
    }
    position += here;
    count -= here;
    out += here;
    ++file;
  }
}

SequenceOrder::SequenceOrder(int64_t stream_size, int64_t context, uint64_t seed, bool shuffle)
    : windows_((stream_size - 1) / context), context_(context), seed_(seed), shuffle_(shuffle) {
  if (windows_ < 1) {
    throw std::runtime_error(
        "the data has " + std::to_string(stream_size) + " tokens, too few for one sequence of " +
        std::to_string(context) + " tokens plus its last target");
  }
}

int64_t SequenceOrder::start_of(int64_t k) const {
  const int64_t epoch = k / windows_, index = k % windows_;
  if (epoch == 0 && !shuffle_) return index * context_;
  const uint64_t key = seed_ * 0x9e3779b97f4a7c15ULL + static_cast<uint64_t>(epoch);
  return permuted(index, windows_, key) * context_;
}

}  // namespace gpt
