#pragma once
// From text files to token shards.

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "gpt/tokenizer.h"

namespace gpt {

/// Calls take(document) for every document of the inputs, in order. An input is a file, a folder (all its .txt
/// files, recursively, sorted by path) or "-" for standard input. In a file, a line <|endoftext|> separates
/// documents. Empty documents are skipped.
void for_each_document(
    const std::vector<std::string>& inputs, const std::function<void(std::string_view)>& take);

struct CorpusOptions {
  std::vector<std::string> inputs;
  std::vector<std::string> validation_inputs;  // empty: use a fraction of the inputs' documents
  double validation_fraction = 0.01;
  std::string folder;      // output folder for the shards and vocabulary.tiktoken
  std::string vocabulary;  // as for Vocabulary::from_file; empty: learn one
  int64_t learn_size = 0;  // size of the vocabulary to learn from the training text
  int64_t shard_tokens = 100'000'000;
  int threads = 1;
  bool overwrite = false;  // delete shards already in the folder
};

struct CorpusCounts {
  int64_t documents = 0;
  int64_t bytes = 0;
  int64_t tokens = 0;
};

struct CorpusSummary {
  CorpusCounts training, validation;
  int64_t vocabulary = 0;
};

/// Reports the current stage ("counting", "learning", "encoding") and the fraction done, from 0 to 1.
using CorpusProgress = std::function<void(const char* stage, double fraction)>;

/// Writes train_*.bin, val_*.bin and vocabulary.tiktoken. Every document is preceded by the end-of-text token. With
/// a fraction, validation documents are spread evenly over the inputs, at least one; if there is only one document,
/// its end is used.
CorpusSummary tokenize_corpus(const CorpusOptions& options, const CorpusProgress& progress);

}  // namespace gpt
