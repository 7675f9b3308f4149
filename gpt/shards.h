#pragma once
// Token shards: files with a header of 256 int32 {20240520, 1, number of tokens, 0 …}, followed by uint16 tokens.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gpt/manifest.h"

namespace gpt {

/// Writes FOLDER/SPLIT_000000.bin, FOLDER/SPLIT_000001.bin, … with at most `shard_tokens` tokens each. Every error, a full
/// disk included, is thrown by write() or finish().
class ShardWriter {
 public:
  ShardWriter(std::string folder, std::string split, int64_t shard_tokens);
  ~ShardWriter();
  ShardWriter(ShardWriter&&) noexcept;

  void write(const std::vector<uint32_t>& tokens);
  /// Closes the last shard and returns what was written. The files are synced.
  std::vector<ShardRecord> finish();

 private:
  struct Shard;
  void open();
  void flush();
  void close();

  std::string folder_, split_;
  int64_t shard_tokens_;
  std::unique_ptr<Shard> shard_;
  std::vector<ShardRecord> written_;
};

/// All shards of a split, read as one stream. If the folder has a manifest, whatever is read was compared with it.
/// Files stay open, so a stream outlives the deletion or replacement of its files; one that is written to is refused by
/// the next read. Not thread-safe.
class TokenStream {
 public:
  /// Opens the files in `folder` whose names contain the word `split` and end in .bin, sorted by name:
  /// train_000000.bin, fineweb_train_000001.bin, but not constrained.bin. Every token must be below `vocabulary`
  /// (checked when read). Errors name the file.
  TokenStream(const std::string& folder, const std::string& split, int64_t vocabulary);
  ~TokenStream();
  TokenStream(TokenStream&&) noexcept;

  int64_t size() const { return size_; }
  /// Whether the folder has a manifest.
  bool has_manifest() const { return has_manifest_; }
  /// Copies `count` tokens, starting at `position`, to `out`. They must lie within the stream.
  void read(int64_t position, int64_t count, int64_t* out) const;

 private:
  struct File;
  std::vector<File> files_;
  int64_t size_ = 0;
  int64_t vocabulary_;
  bool has_manifest_;
};

/// Where the k-th training sequence starts. The stream is cut into windows of `context` tokens (the token after a
/// window is its last target). Every epoch reads them in its own order, drawn from the seed; the first epoch reads
/// them in stream order unless `shuffle`. The start is a pure function of k, so it does not depend on how a batch is
/// split or where a run was resumed.
class SequenceOrder {
 public:
  SequenceOrder(int64_t stream_size, int64_t context, uint64_t seed, bool shuffle = false);
  int64_t windows() const { return windows_; }
  int64_t start_of(int64_t k) const;

 private:
  int64_t windows_, context_;
  uint64_t seed_;
  bool shuffle_;
};

}  // namespace gpt
