// Command lines, one word a line. They are parsed; nothing is run.

#include "cli/arguments.h"

#include <algorithm>

#include "cli/commands.h"
#include "harness.h"
#include "train/config.h"

namespace {

// Thrown when all words are parsed, before a command runs.
struct Parsed {};

void declare(CLI::App& app) {
  app.require_subcommand(0, 1);
  app.set_version_flag("--version", "group-muon");
  cli::add_tokenize(app);
  cli::add_train(app);
  cli::add_sample(app);
  cli::add_analyze(app);
  cli::add_study(app);
  cli::add_report(app);
  app.parse_complete_callback([] { throw Parsed(); });
}

void parse(CLI::App& app, std::vector<std::string> given) {
  given.insert(given.begin(), "group-muon");
  std::vector<char*> argv;
  for (auto& word : given) argv.push_back(word.data());
  auto words = cli::checked_words(app, static_cast<int>(argv.size()), argv.data());
  std::reverse(words.begin(), words.end());
  app.parse(std::move(words));
}

// The options of `train` on the command line.
train::Options options_of(const CLI::App& app) {
  train::Options options;
  for (const auto& key : train::config_keys()) {
    const auto* option = app.get_subcommand("train")->get_option("--" + key.name);
    for (const auto& value : option->results()) options.emplace_back(key.name, value);
  }
  return options;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  auto words = input.lines();
  for (auto& word : words) word = word.c_str();  // ends at a zero
  CLI::App app;
  declare(app);
  try {
    parse(app, words);
  } catch (const Parsed&) {
    fuzz::accepted(input, [&] { train::configure(options_of(app)); });
  } catch (const cli::WrongUse& error) {
    fuzz::check_words(input, error.what());
  } catch (const CLI::Success&) {
  } catch (const CLI::ParseError& error) {
    fuzz::check_words(input, cli::words_of(error, app));
  }
  return 0;
}
