#pragma once
// From text files to token shards.

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "gpt/tokenizer.h"

namespace gpt {

struct CorpusOptions {
  /// Files, folders (all their .txt files, recursively, sorted by path) or "-" for standard input. In a file, a line
  /// <|endoftext|> separates documents. Documents of blanks alone are skipped.
  std::vector<std::string> inputs;
  std::vector<std::string> validation_inputs;  // empty: use a fraction of the inputs' documents
  double validation_fraction = 0.01;
  std::string folder;      // output folder
  std::string vocabulary;  // as for Vocabulary::from_file; empty: learn one
  int64_t learn_size = 0;  // size of the vocabulary to learn from the training text
  int64_t shard_tokens = 100'000'000;
  int threads = 1;                     // at most; fewer if the system does not give as many
  bool overwrite = false;              // replace the data in the folder
  std::string program = "group-muon";  // for the manifest
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

/// Writes train_*.bin, val_*.bin, vocabulary.tiktoken and manifest.json to a hidden folder beside the final one, and
/// renames it when all is synced: the folder is whole or not there. Every document is preceded by the end-of-text token.
/// With a fraction, validation documents are spread evenly over the inputs, at least one; if there is only one document,
/// its end is used.
///
/// Text is read in pieces. Memory grows with the number of threads and the longest word, and when learning with the
/// number of different words, but not with the text.
CorpusSummary tokenize_corpus(const CorpusOptions& options, const CorpusProgress& progress);

}  // namespace gpt
