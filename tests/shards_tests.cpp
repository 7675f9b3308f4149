#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <numeric>

#include "gpt/files.h"
#include "gpt/shards.h"
#include "testing.h"

namespace gpt {
namespace {

namespace fs = std::filesystem;

class ShardsTest : public testing::Test {
 protected:
  void write(const std::vector<uint32_t>& tokens, int64_t shard_tokens) {
    ShardWriter writer(folder_.string(), "train", shard_tokens);
    writer.write(tokens);
    writer.finish();
  }
  TokenStream stream(int64_t vocabulary = 65536) { return {folder_.string(), "train", vocabulary}; }
  std::string error_of_stream() {
    try {
      stream();
    } catch (const std::runtime_error& error) {
      return error.what();
    }
    return "no error";
  }
  // Overwrites an int32 of a shard's header.
  void spoil(int index, int32_t value) {
    std::fstream file(
        folder_ / "train_000000.bin", std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(4 * index);
    file.write(reinterpret_cast<const char*>(&value), 4);
  }

  TemporaryFolder temporary_;
  const fs::path folder_ = temporary_.path();
};

std::vector<uint32_t> counting(uint32_t count) {
  std::vector<uint32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), 0);
  return tokens;
}

TEST_F(ShardsTest, AStreamReadsAcrossFiles) {
  write(counting(1000), 300);
  const auto tokens = stream();
  ASSERT_EQ(tokens.size(), 1000);
  for (const auto& [position, count] : std::vector<std::pair<int64_t, int64_t>>{
           {0, 1000}, {299, 2}, {300, 300}, {250, 700}, {999, 1}}) {
    std::vector<int64_t> out(count);
    tokens.read(position, count, out.data());
    for (int64_t i = 0; i < count; ++i) ASSERT_EQ(out[i], position + i);
  }
  int64_t past = 0;
  EXPECT_THROW(tokens.read(1000, 1, &past), std::runtime_error);
}

TEST_F(ShardsTest, AWriterReportsAChecksumForEveryBlock) {
  ShardWriter writer(folder_.string(), "train", 2 * kBlockTokens + 10);
  std::vector<uint32_t> tokens(2 * kBlockTokens + 15);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<uint32_t>(i * i % 65536);
  for (size_t at = 0; at < tokens.size(); at += 1000) {  // in pieces that do not fit the blocks
    const auto end = std::min(at + 1000, tokens.size());
    writer.write({tokens.begin() + static_cast<std::ptrdiff_t>(at), tokens.begin() + end});
  }
  const auto records = writer.finish();
  ASSERT_EQ(records.size(), 2U);
  EXPECT_EQ(records[0].name, "train_000000.bin");
  EXPECT_EQ(records[0].tokens, 2 * kBlockTokens + 10);
  EXPECT_EQ(records[1].tokens, 5);
  const std::vector<uint16_t> narrow(tokens.begin(), tokens.end());
  const std::vector<uint32_t> expected = {
      crc32c(0, narrow.data(), 2 * kBlockTokens),
      crc32c(0, narrow.data() + kBlockTokens, 2 * kBlockTokens),
      crc32c(0, narrow.data() + 2 * kBlockTokens, 20)};
  EXPECT_EQ(records[0].crcs, expected);
}

TEST_F(ShardsTest, BlocksAreComparedWithTheManifestWhenTheyAreFirstRead) {
  ShardWriter writer(folder_.string(), "train", 4 * kBlockTokens);
  writer.write(std::vector<uint32_t>(3 * kBlockTokens, 7));
  const std::string vocabulary = "a vocabulary";
  std::ofstream(folder_ / kVocabularyFile) << vocabulary;
  Manifest manifest;
  manifest.vocabulary = 300;
  manifest.vocabulary_crc = crc32c(0, vocabulary.data(), vocabulary.size());
  manifest.shards = writer.finish();
  write_manifest(folder_.string(), manifest);
  EXPECT_EQ(vocabulary_of_data(folder_.string()), 300);
  spoil(256 + kBlockTokens / 2 + 100, 8);  // in the second block
  const auto tokens = stream();
  EXPECT_TRUE(tokens.has_manifest());
  std::vector<int64_t> out(1000);
  EXPECT_NO_THROW(tokens.read(0, 1000, out.data()));
  EXPECT_NO_THROW(tokens.read(3 * kBlockTokens - 1000, 1000, out.data()));
  EXPECT_NE(
      error_of<std::runtime_error>([&] {
        tokens.read(kBlockTokens - 999, 1000, out.data());
      }).find("is damaged: its tokens from position 524288 on"),
      std::string::npos);
}

TEST_F(ShardsTest, AFileThatIsWrittenToIsRefusedAndOneThatIsReplacedIsNot) {
  write(counting(1000), 2000);
  const auto tokens = stream();
  int64_t token = 0;
  fs::rename(folder_ / "train_000000.bin", folder_ / "elsewhere");
  write(std::vector<uint32_t>(1000, 9), 2000);
  tokens.read(5, 1, &token);
  EXPECT_EQ(token, 5);
  fs::rename(folder_ / "elsewhere", folder_ / "train_000000.bin");
  fs::resize_file(folder_ / "train_000000.bin", 1024 + 100);
  EXPECT_NE(
      error_of<std::runtime_error>([&] {
        tokens.read(5, 1, &token);
      }).find("train_000000.bin' was changed while it was in use"),
      std::string::npos);
}

TEST_F(ShardsTest, MoreFilesThanAProcessMayOpenAtFirst) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  write(counting(200), 1);
  const rlimit few = {100, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  const auto tokens = stream();
  std::vector<int64_t> out(200);
  tokens.read(0, 200, out.data());
  EXPECT_EQ(out[199], 199);
  ::setrlimit(RLIMIT_NOFILE, &before);
}

TEST_F(ShardsTest, BadFilesAreRefusedByName) {
  EXPECT_NE(error_of_stream().find("has no *train*.bin shard"), std::string::npos);
  write(counting(10), 100);
  spoil(0, 7);
  EXPECT_NE(
      error_of_stream().find("train_000000.bin' is not a token shard (its magic number is 7"),
      std::string::npos);
  spoil(0, 20240520);
  spoil(1, 2);
  EXPECT_NE(
      error_of_stream().find("is a shard of version 2; only version 1 is supported"),
      std::string::npos);
  spoil(1, 1);
  fs::resize_file(folder_ / "train_000000.bin", 1024 + 12);
  EXPECT_NE(
      error_of_stream().find("is truncated: its header says 10 tokens, but it holds 6"),
      std::string::npos);
  fs::resize_file(folder_ / "train_000000.bin", 100);
  EXPECT_NE(error_of_stream().find("is shorter than a shard's header"), std::string::npos);
}

TEST_F(ShardsTest, ATokenOutsideTheVocabularyIsRefused) {
  write({1, 2, 50, 3}, 100);
  const auto tokens = stream(50);
  std::vector<int64_t> out(4);
  EXPECT_NO_THROW(tokens.read(0, 2, out.data()));
  try {
    tokens.read(0, 4, out.data());
    FAIL();
  } catch (const std::runtime_error& error) {
    EXPECT_NE(
        std::string(error.what())
            .find("holds token 50 at position 2, but the vocabulary size is 50"),
        std::string::npos);
  }
}

TEST(SequenceOrder, TheFirstEpochIsInOrderAndEveryLaterOneAPermutationOfItsOwn) {
  const SequenceOrder order(1001, 10, 7);
  ASSERT_EQ(order.windows(), 100);
  std::vector<std::vector<int64_t>> epochs;
  for (int64_t epoch = 0; epoch < 4; ++epoch) {
    std::vector<int64_t> starts;
    for (int64_t k = 0; k < 100; ++k) starts.push_back(order.start_of(100 * epoch + k));
    epochs.push_back(starts);
    std::sort(starts.begin(), starts.end());
    for (int64_t i = 0; i < 100; ++i) EXPECT_EQ(starts[i], 10 * i);
  }
  for (int64_t i = 0; i < 100; ++i) EXPECT_EQ(epochs[0][i], 10 * i);
  EXPECT_NE(epochs[1], epochs[0]);
  EXPECT_NE(epochs[2], epochs[1]);
  EXPECT_NE(SequenceOrder(1001, 10, 8).start_of(100), SequenceOrder(1001, 10, 9).start_of(100));
}

TEST(SequenceOrder, AShuffledFirstEpochIsAPermutationToo) {
  const SequenceOrder order(1001, 10, 7, /*shuffle=*/true);
  std::vector<int64_t> starts;
  for (int64_t k = 0; k < 100; ++k) starts.push_back(order.start_of(k));
  EXPECT_FALSE(std::is_sorted(starts.begin(), starts.end()));
  std::sort(starts.begin(), starts.end());
  for (int64_t k = 0; k < 100; ++k) EXPECT_EQ(starts[k], 10 * k);
  EXPECT_NE(order.start_of(0), SequenceOrder(1001, 10, 8, true).start_of(0));
}

TEST(SequenceOrder, TheLastTargetMustBeInTheStream) {
  EXPECT_EQ(SequenceOrder(1000, 10, 0).windows(), 99);
  EXPECT_THROW(SequenceOrder(10, 10, 0), std::runtime_error);
}

TEST_F(ShardsTest, SplitsAreWordsOfFileNames) {
  write({1, 2, 3}, 10);
  fs::copy_file(folder_ / "train_000000.bin", folder_ / "constrained_000000.bin");
  fs::copy_file(folder_ / "train_000000.bin", folder_ / "fineweb_train_000001.bin");
  EXPECT_EQ(stream().size(), 6);
  fs::copy_file(folder_ / "train_000000.bin", folder_ / "retrieval_train.bin");
  EXPECT_THROW((TokenStream{folder_.string(), "val", 65536}), std::runtime_error);
}

}  // namespace
}  // namespace gpt
