// group-muon tokenize: text files → token shards.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <thread>

#include "cli/commands.h"
#include "cli/terminal.h"
#include "gpt/corpus.h"

namespace cli {
namespace {

void run(const gpt::CorpusOptions& options) {
  const auto summary = gpt::tokenize_corpus(options, [](const char* stage, double fraction) {
    char percent[16];
    std::snprintf(percent, sizeof percent, " %3.0f%%", 100 * fraction);
    show_live(fraction, std::string(stage) + percent);
  });
  end_live();
  const auto line = [](const char* split, const gpt::CorpusCounts& counts) {
    std::printf(
        "%-11s %10lld document%s %12lld bytes %12lld tokens\n", split,
        static_cast<long long>(counts.documents), counts.documents == 1 ? " " : "s",
        static_cast<long long>(counts.bytes), static_cast<long long>(counts.tokens));
  };
  line("training", summary.training);
  line("validation", summary.validation);
  if (summary.validation.tokens == 0) {
    std::puts("note: there is no validation text, which 'train' needs; set --validation-fraction");
  }
  std::printf(
      "vocabulary  %lld entries\nwritten to  %s\n", static_cast<long long>(summary.vocabulary),
      options.folder.c_str());
}

}  // namespace

void add_tokenize(CLI::App& app) {
  auto options = std::make_shared<gpt::CorpusOptions>();
  options->threads = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  auto* command = app.add_subcommand("tokenize", "Turn text into training and validation shards");
  command
      ->add_option(
          "inputs", options->inputs, "Text files, folders of .txt files, or - for standard input")
      ->required();
  command->add_option("-o,--out", options->folder, "Folder for the shards and the vocabulary")
      ->required();
  auto* vocabulary = command->add_option(
      "--vocabulary", options->vocabulary,
      "Vocabulary: gpt2, a .tiktoken file or GPT-2's vocab.bpe");
  command
      ->add_option(
          "--learn", options->learn_size,
          "Learn a byte-level vocabulary with this number of entries from the text")
      ->excludes(vocabulary);
  command->add_option(
      "--validation", options->validation_inputs, "Inputs for the validation shards");
  command
      ->add_option(
          "--validation-fraction", options->validation_fraction,
          "Fraction of documents kept for validation, spread evenly, unless --validation is given; "
          "of a single document its end is kept")
      ->check(CLI::Range(0.0, 0.5))
      ->capture_default_str();
  command->add_flag(
      "--overwrite", options->overwrite, "Delete shards that are already in the folder");
  command->add_option("--shard-tokens", options->shard_tokens, "Maximum number of tokens per shard")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--threads", options->threads, "Number of threads")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->callback([options] { run(*options); });
}

}  // namespace cli
