#include "gpt/shards.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <stdexcept>

namespace gpt {
namespace {

constexpr int32_t kMagic = 20240520;
constexpr int32_t kVersion = 1;
constexpr int64_t kHeaderInts = 256;
constexpr int64_t kHeaderBytes = kHeaderInts * 4;

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw std::runtime_error("'" + path + "': " + what);
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
  std::string path;
  std::FILE* file;
  int64_t tokens = 0;
};

ShardWriter::ShardWriter(std::string folder, std::string split, int64_t shard_tokens)
    : folder_(std::move(folder)), split_(std::move(split)), shard_tokens_(shard_tokens) {
  if (shard_tokens_ < 1) throw std::runtime_error("a shard should have at least one token");
}

ShardWriter::ShardWriter(ShardWriter&&) noexcept = default;

ShardWriter::~ShardWriter() {
  // Not finished: delete the partial shard.
  if (!shard_) return;
  std::fclose(shard_->file);
  std::remove((shard_->path + ".tmp").c_str());
}

void ShardWriter::open() {
  char number[16];
  std::snprintf(number, sizeof number, "_%06d.bin", next_number_++);
  const std::string path = folder_ + "/" + split_ + number;
  std::FILE* file = std::fopen((path + ".tmp").c_str(), "wb");
  if (file == nullptr) fail(path, std::string("cannot be written: ") + std::strerror(errno));
  shard_ = std::make_unique<Shard>(Shard{path, file});
  const std::vector<int32_t> header(kHeaderInts, 0);
  std::fwrite(header.data(), 4, header.size(), file);
}

void ShardWriter::close() {
  const auto shard = std::move(shard_);
  std::vector<int32_t> header = {kMagic, kVersion, static_cast<int32_t>(shard->tokens)};
  // An earlier write may have failed already, and the last one may fail when the file is closed.
  const bool written = std::ferror(shard->file) == 0 && std::fseek(shard->file, 0, SEEK_SET) == 0 &&
                       std::fwrite(header.data(), 4, header.size(), shard->file) == header.size() &&
                       std::fflush(shard->file) == 0;
  int error = errno;
  const bool closed = std::fclose(shard->file) == 0;
  if (written && !closed) error = errno;
  const std::string temporary = shard->path + ".tmp";
  if (!written || !closed) {
    std::remove(temporary.c_str());
    fail(shard->path, std::string("cannot be written: ") + std::strerror(error));
  }
  std::filesystem::rename(temporary, shard->path);
}

void ShardWriter::write(const std::vector<uint32_t>& tokens) {
  std::vector<uint16_t> narrow;
  for (size_t at = 0; at < tokens.size();) {
    if (!shard_) open();
    const auto room = static_cast<size_t>(shard_tokens_ - shard_->tokens);
    const size_t count = std::min(room, tokens.size() - at);
    narrow.assign(tokens.data() + at, tokens.data() + at + count);
    std::fwrite(narrow.data(), 2, count, shard_->file);
    shard_->tokens += static_cast<int64_t>(count);
    total_ += static_cast<int64_t>(count);
    at += count;
    if (shard_->tokens == shard_tokens_) close();
  }
}

int64_t ShardWriter::finish() {
  if (shard_) close();
  return total_;
}

struct TokenStream::File {
  std::string path;
  const uint16_t* tokens;
  int64_t first, count;
  void* mapping;
  size_t bytes;
};

TokenStream::TokenStream(const std::string& folder, const std::string& split, int64_t vocabulary)
    : vocabulary_(vocabulary) {
  std::vector<std::string> paths;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const auto name = entry.path().filename().string();
    if (has_word(name, split) && entry.path().extension() == ".bin") {
      paths.push_back(entry.path().string());
    }
  }
  if (error) fail(folder, "cannot be read: " + error.message());
  if (paths.empty()) {
    fail(
        folder, "has no *" + split + "*.bin shard; make some with 'group-muon tokenize'" +
                    (split == "val" ? " --validation or --validation-fraction" : ""));
  }
  std::sort(paths.begin(), paths.end());
  for (const auto& path : paths) {
    const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) fail(path, std::string("cannot be read: ") + std::strerror(errno));
    struct stat status{};
    ::fstat(descriptor, &status);
    const auto bytes = static_cast<int64_t>(status.st_size);
    void* mapping = bytes >= kHeaderBytes
                        ? ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, descriptor, 0)
                        : MAP_FAILED;
    ::close(descriptor);
    if (mapping == MAP_FAILED) fail(path, "is shorter than a shard's header");
    const auto* header = static_cast<const int32_t*>(mapping);
    const auto* tokens = reinterpret_cast<const uint16_t*>(header + kHeaderInts);
    files_.push_back({path, tokens, size_, header[2], mapping, static_cast<size_t>(bytes)});
    if (header[0] != kMagic)
      fail(
          path, "is not a token shard (its magic number is " + std::to_string(header[0]) +
                    ", not 20240520)");
    if (header[1] != kVersion)
      fail(
          path,
          "is a shard of version " + std::to_string(header[1]) + "; only version 1 is supported");
    if (bytes != kHeaderBytes + 2 * int64_t{header[2]}) {
      fail(
          path, "is truncated: its header says " + std::to_string(header[2]) +
                    " tokens, but it holds " + std::to_string((bytes - kHeaderBytes) / 2));
    }
    size_ += header[2];
  }
}

TokenStream::TokenStream(TokenStream&&) noexcept = default;

TokenStream::~TokenStream() {
  for (const auto& file : files_) ::munmap(file.mapping, file.bytes);
}

void TokenStream::read(int64_t position, int64_t count, int64_t* out) const {
  auto file = std::upper_bound(
      files_.begin(), files_.end(), position,
      [](int64_t at, const File& other) { return at < other.first + other.count; });
  while (count > 0) {
    if (file == files_.end()) throw std::runtime_error("read past the end of the token stream");
    const int64_t offset = position - file->first;
    const int64_t here = std::min(count, file->count - offset);
    for (int64_t i = 0; i < here; ++i) {
      out[i] = file->tokens[offset + i];
      if (out[i] >= vocabulary_) {
        fail(
            file->path, "holds token " + std::to_string(out[i]) + " at position " +
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
