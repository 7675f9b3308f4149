// Shards, with and without a manifest that vouches for them.

#include "gpt/shards.h"

#include <cstring>

#include "gpt/files.h"
#include "harness.h"

namespace {

constexpr size_t kHeaderBytes = 1024;

std::string with_header(const std::string& tokens) {
  const int32_t start[] = {20240520, 1, static_cast<int32_t>(tokens.size() / 2)};
  std::string bytes(kHeaderBytes, '\0');
  std::memcpy(bytes.data(), start, sizeof start);
  return bytes + tokens;
}

void write_manifest(const std::string& folder, const std::string& shard, bool wrong) {
  gpt::Manifest manifest;
  manifest.vocabulary = 1;
  const std::string vocabulary = "any text";
  fuzz::write(folder, gpt::kVocabularyFile, vocabulary);
  manifest.vocabulary_crc = gpt::crc32c(0, vocabulary.data(), vocabulary.size());
  const std::string tokens = shard.substr(std::min(kHeaderBytes, shard.size()));
  const uint32_t crc = gpt::crc32c(0, tokens.data(), tokens.size());
  manifest.shards.push_back({"train_0.bin", static_cast<int64_t>(tokens.size() / 2), {}});
  if (tokens.size() > 1) manifest.shards.back().crcs.push_back(wrong ? ~crc : crc);
  gpt::write_manifest(folder, manifest);
}

// Every epoch reads every window once.
void check_order(int64_t tokens, int64_t context, bool shuffle) {
  const gpt::SequenceOrder order(tokens, context, /*seed=*/1, shuffle);
  std::vector<bool> seen(static_cast<size_t>(order.windows()));
  for (int64_t k = 0; k < order.windows(); ++k) {
    const int64_t start = order.start_of(order.windows() + k);
    fuzz::require(start >= 0 && start + context < tokens, "a sequence ends outside the stream");
    fuzz::require(!seen[start / context], "a sequence is read twice");
    seen[start / context] = true;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const int64_t kind = input.number(3), vocabulary = 1 + input.number(65535);
  const int64_t position = input.number(INT32_MAX), context = 1 + input.number(99);
  const std::string bytes = kind == 0 ? input.rest() : with_header(input.rest());
  const std::string folder = fuzz::empty_folder();
  fuzz::write(folder, "train_0.bin", bytes);
  if (kind > 1) write_manifest(folder, bytes, /*wrong=*/kind == 3);
  const auto check = [&] {
    const gpt::TokenStream stream(folder, "train", vocabulary);
    const auto total = static_cast<int64_t>((bytes.size() - kHeaderBytes) / 2);
    fuzz::require(stream.size() == total, "the stream has another size");
    if (total == 0) return;
    const int64_t start = position % total;
    std::vector<int64_t> tokens(static_cast<size_t>(total - start));
    stream.read(start, total - start, tokens.data());
    fuzz::require(kind != 3, "a wrong checksum is accepted");
    for (size_t i = 0; i < tokens.size(); ++i) {
      uint16_t token = 0;
      std::memcpy(&token, bytes.data() + kHeaderBytes + 2 * (start + i), 2);
      fuzz::require(tokens[i] == token && token < vocabulary, "a token is another");
    }
    check_order(total, context, kind == 1);
  };
  fuzz::accepted(input, check);
  return 0;
}
