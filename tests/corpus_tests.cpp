// Text to shards in several threads, with a vocabulary learnt by them.

#include <filesystem>
#include <random>

#include "gpt/corpus.h"
#include "gpt/files.h"
#include "testing.h"

namespace gpt {
namespace {

TEST(CorpusTest, TheNumberOfThreadsDoesNotChangeTheData) {
  const TemporaryFolder folder;
  std::mt19937 draw(0);
  {
    OutputFile text(folder / "text.txt");
    for (int line = 0; line < 20'000; ++line) {
      for (int word = 0; word < 8; ++word) {
        text.write(std::to_string(draw() % 500));
        text.write(" ");
      }
      text.write(line % 100 == 99 ? "\n<|endoftext|>\n" : "\n");
    }
  }
  CorpusOptions options;
  options.inputs = {folder / "text.txt"};
  options.learn_size = 400;
  options.shard_tokens = 50'000;
  for (const int threads : {1, 4}) {
    options.threads = threads;
    options.folder = folder / std::to_string(threads);
    tokenize_corpus(options, [](const char*, double) {});
  }
  const auto names = names_in(folder / "1");
  EXPECT_GE(names.size(), 5);
  EXPECT_EQ(names, names_in(folder / "4"));
  for (const auto& name : names) {
    const auto content = [&](const char* threads) {
      return read_whole(folder / threads + "/" + name, SIZE_MAX);
    };
    EXPECT_EQ(content("1"), content("4")) << name;
  }
}

}  // namespace
}  // namespace gpt
