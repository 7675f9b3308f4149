// group-muon tokenize: text files → token shards.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <thread>

#include "cli/commands.h"
#include "cli/terminal.h"
#include "gpt/corpus.h"

namespace cli {
namespace {

// A number in [least, most]. CLI11's own check takes nan and prints limits with 300 digits.
CLI::Validator number(double least, double most, bool whole) {
  return CLI::Validator(
      [=](const std::string& text) {
        char* end = nullptr;
        const double value = std::strtod(text.c_str(), &end);
        const bool good = !text.empty() && *end == '\0' && value >= least && value <= most &&
                          (!whole || value == std::floor(value));
        char limits[64];
        std::snprintf(limits, sizeof limits, " from %.10g to %.10g", least, most);
        return good ? std::string()
                    : std::string("should be a ") + (whole ? "whole number" : "number") + limits +
                          ", not '" + text + "'";
      },
      "");
}

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
  options->program = "group-muon " GROUP_MUON_VERSION;
  options->threads = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  auto* command = app.add_subcommand("tokenize", "Turn text into training and validation shards");
  command
      ->add_option(
          "inputs", options->inputs, "Text files, folders of .txt files, or - for standard input")
      ->required();
  command
      ->add_option(
          "-o,--out", options->folder,
          "Folder for the shards, the vocabulary and the manifest, and for nothing else")
      ->required();
  auto* vocabulary = command->add_option(
      "--vocabulary", options->vocabulary,
      "Vocabulary: gpt2, a .tiktoken file or GPT-2's vocab.bpe");
  command
      ->add_option(
          "--learn", options->learn_size,
          "Learn a byte-level vocabulary with this number of entries from the text")
      ->check(number(257, 65536, /*whole=*/true))
      ->excludes(vocabulary);
  command->add_option(
      "--validation", options->validation_inputs, "Inputs for the validation shards");
  command
      ->add_option(
          "--validation-fraction", options->validation_fraction,
          "Fraction of documents kept for validation, spread evenly, unless --validation is given; "
          "a single document is cut, and its end kept")
      ->check(number(0, 0.5, /*whole=*/false))
      ->capture_default_str();
  command->add_flag(
      "--overwrite", options->overwrite,
      "Replace the data in the folder, all at once and only when the new data is complete");
  command->add_option("--shard-tokens", options->shard_tokens, "Maximum number of tokens per shard")
      ->check(number(1, std::numeric_limits<int32_t>::max(), /*whole=*/true))
      ->capture_default_str();
  command
      ->add_option(
          "--threads", options->threads,
          "Number of threads; more than 256, or more than the system allows, are not started")
      ->check(number(1, 1e6, /*whole=*/true))
      ->capture_default_str();
  command->callback([options] { run(*options); });
}

}  // namespace cli
