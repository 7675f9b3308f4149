#pragma once
// manifest.json: what a data folder holds. `group-muon tokenize` writes it last; whoever reads the folder compares.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace gpt {

constexpr const char* kManifestFile = "manifest.json";
constexpr const char* kVocabularyFile = "vocabulary.tiktoken";

/// Tokens per checksum. Training can so check a part of a shard when it first reads from it.
constexpr int64_t kBlockTokens = int64_t{1} << 19;

struct ShardRecord {
  std::string name;
  int64_t tokens = 0;
  std::vector<uint32_t> crcs = {};  // CRC-32C of every kBlockTokens tokens
};

struct Manifest {
  int64_t vocabulary = 0;  // entries, with end of text
  uint32_t vocabulary_crc = 0;
  std::vector<ShardRecord> shards = {};
  std::string made_from = "{}";  // JSON: program, options, counts; only for people
};

/// Writes FOLDER/manifest.json and syncs it.
void write_manifest(const std::string& folder, const Manifest& manifest);

/// Reads FOLDER/manifest.json and compares the vocabulary file with it. Nothing if there is no such file: shards made by
/// others have none. Throws if it is damaged, or if the vocabulary is another.
std::optional<Manifest> read_manifest(const std::string& folder);

/// What to do about a data folder that is not as its manifest says; ends a sentence.
std::string remedy();

/// The vocabulary size of a data folder: the manifest's; without one, of vocabulary.tiktoken; without that, GPT-2's 50257.
int64_t vocabulary_of_data(const std::string& folder);

}  // namespace gpt
