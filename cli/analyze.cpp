// group-muon analyze: gain and cost of head groups at a checkpoint, and what one step of each really does.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>

#include "cli/commands.h"
#include "cli/terminal.h"
#include "train/analysis_report.h"
#include "train/files.h"

namespace cli {
namespace {

struct AnalyzeArguments {
  train::AnalyzeOptions options;
  std::string json;
  bool estimate = false;
};

void run(const AnalyzeArguments& arguments) {
  auto options = arguments.options;
  options.exact = !arguments.estimate;
  if (!arguments.json.empty()) train::replace_file(arguments.json, "{}\n");  // can be written
  const auto analysis = train::analyze(options, [](double part) {
    char text[64];
    std::snprintf(text, sizeof text, "analyzing %3.0f%%", 100 * part);
    show_live(part, text);
  });
  end_live();
  say("checkpoint " + analysis.checkpoint);
  std::fputs(train::to_text(analysis).c_str(), stdout);
  if (!arguments.json.empty()) {
    train::replace_file(arguments.json, train::to_json(analysis));
    say("wrote " + arguments.json);
  }
}

}  // namespace

void add_analyze(CLI::App& app) {
  auto arguments = std::make_shared<AnalyzeArguments>();
  auto& options = arguments->options;
  auto* command = app.add_subcommand(
      "analyze",
      "At a checkpoint: gain and cost of head groups, and what one step of each really does");
  command
      ->add_option("run", options.path, "Folder of a run (its newest checkpoint) or a checkpoint")
      ->required();
  command->add_option("--data", options.data, "Folder with shards; by default the run's");
  command->add_option(
      "--groups", options.groups,
      "Groupings of Q, K and V besides packed and three-way, as 1,2:random,6:random; by default "
      "every size, at "
      "random");
  command
      ->add_option(
          "--lr", options.lr,
          "Learning rate; by default that of the next step, and of a finished run its peak")
      ->check(CLI::PositiveNumber);
  command
      ->add_option(
          "--factors", options.factors,
          "Steps to try, as multiples of the learning rate; 1 among them")
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--layers", options.layers, "Only these, from 0; by default all")
      ->delimiter(',');
  command
      ->add_option(
          "--sequences", options.sequences,
          "Of the batch and of the held-out one; by default a training batch")
      ->check(CLI::PositiveNumber);
  command->add_option("--threads", options.threads, "By default those of the run")
      ->check(CLI::PositiveNumber);
  command->add_flag(
      "--estimate", arguments->estimate, "Estimates instead of singular values: faster");
  command->add_option("--json", arguments->json, "Also write all numbers to this file");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace cli
