// group-muon sample: text from a trained model.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "cli/arguments.h"
#include "cli/commands.h"
#include "gpt/generate.h"
#include "gpt/manifest.h"
#include "gpt/tokenizer.h"
#include "train/memory.h"
#include "train/recipe.h"
#include "train/run.h"

namespace cli {
namespace {

struct SampleArguments {
  std::string run;
  std::string prompt;
  std::string vocabulary;
  bool best = false;
  gpt::GenerateOptions options;
};

gpt::Vocabulary vocabulary_of(const std::string& folder, const std::string& given) {
  const std::string own = folder + "/" + gpt::kVocabularyFile;
  TORCH_CHECK_VALUE(
      !given.empty() || std::filesystem::exists(own), "'", folder,
      "' has no vocabulary.tiktoken; set --vocabulary to gpt2 or a file");
  return gpt::Vocabulary::from_file(given.empty() ? own : given);
}

void run(const SampleArguments& arguments) {
  const auto saved =
      train::read_trained_run(arguments.run, {.best = arguments.best, .weights_only = true});
  const auto& config = saved.config;
  train::require_model_memory(config);
  gpt::Model model(train::model_shape(config), torch::kFloat32, /*seed=*/0);
  train::load_weights(saved.checkpoint, model);

  const auto vocabulary = vocabulary_of(config.out, arguments.vocabulary);
  TORCH_CHECK_VALUE(
      vocabulary.size() <= config.vocabulary, "the vocabulary has ", vocabulary.size(),
      " entries, but the model only has ", config.vocabulary);
  std::vector<uint32_t> prompt = {vocabulary.end_of_text()};
  gpt::Encoder(vocabulary).encode(arguments.prompt, prompt);
  std::fwrite(arguments.prompt.data(), 1, arguments.prompt.size(), stdout);
  gpt::generate(model, prompt, arguments.options, [&](uint32_t id) {
    if (id >= vocabulary.end_of_text()) return false;
    const std::string& bytes = vocabulary.token(id);
    std::fwrite(bytes.data(), 1, bytes.size(), stdout);
    std::fflush(stdout);
    return true;
  });
  std::fputc('\n', stdout);
}

}  // namespace

void add_sample(CLI::App& app) {
  auto arguments = std::make_shared<SampleArguments>();
  auto& options = arguments->options;
  auto* command = app.add_subcommand("sample", "Generate text with a trained model");
  command
      ->add_option(
          "run", arguments->run, "Folder of a run (uses its newest checkpoint) or of a checkpoint")
      ->required();
  command->add_option("--prompt", arguments->prompt, "Text to continue; empty: starts a document")
      ->type_name(kAnyText);
  command->add_flag(
      "--best", arguments->best, "Use the checkpoint with the lowest validation loss");
  command
      ->add_option(
          "--tokens", options.tokens,
          "Maximum number of tokens; stops early at the end of a document")
      ->check(whole_number(1, INT64_MAX))
      ->capture_default_str();
  command
      ->add_option(
          "--temperature", options.temperature,
          "Randomness: lower is more predictable; 0: always the likeliest token")
      ->capture_default_str();
  command
      ->add_option(
          "--top-k", options.top_k, "Draw only from this many likeliest tokens; 0: from all")
      ->check(whole_number(0, INT64_MAX))
      ->capture_default_str();
  command->add_option("--seed", options.seed, "Seed of the random draws")
      ->check(whole_number(0, INT64_MAX))
      ->capture_default_str();
  command->add_option(
      "--vocabulary", arguments->vocabulary,
      "Vocabulary: gpt2, a .tiktoken file or GPT-2's vocab.bpe; default: the run's own");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace cli
