#pragma once
// From text files to token shards.

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "gpt/tokenizer.h"

namespace gpt {

/// Calls take(document) for every document of the inputs, in order. An input is a file, a folder (all
/// its .txt files, those below it too, by name) or "-" for standard input. In a file, lines that
/// say <|endoftext|> part documents; empty documents are left out.
void for_each_document(
    const std::vector<std::string>& inputs, const std::function<void(std::string_view)>& take);

struct CorpusOptions {
  std::vector<std::string> inputs;
  std::vector<std::string> validation_inputs;  // empty: a fraction of the inputs' documents
  double validation_fraction = 0.01;
  std::string folder;      // where shards and vocabulary.tiktoken go
  std::string vocabulary;  // as Vocabulary::from_file takes it; empty: learn one
  int64_t learn_size = 0;  // entries of a vocabulary learnt from the training text
  int64_t shard_tokens = 100'000'000;
  int threads = 1;
  bool overwrite = false;  // shards that are in the folder already are deleted
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

/// What is being done ("counting", "learning", "encoding"), and how far it is: 0 … 1.
using CorpusProgress = std::function<void(const char* stage, double fraction)>;

/// Writes train_*.bin and val_*.bin, every document preceded by the end-of-text token. With a
/// fraction, documents for validation are spread evenly over the inputs, at least one; of an only
/// document the end is taken.
CorpusSummary tokenize_corpus(const CorpusOptions& options, const CorpusProgress& progress);

}  // namespace gpt
