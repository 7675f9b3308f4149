// group-muon analyze: gain and cost of head groups at a checkpoint, and what one real step of each does to the loss.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>

#include "cli/arguments.h"
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
  if (!arguments.json.empty()) train::check_replaceable(arguments.json);  // fail early
  const auto analysis = train::analyze(options, [](double part) {
    char text[64];
    std::snprintf(text, sizeof text, "analyzing %3.0f%%", 100 * part);
    show_live(part, text);
  });
  end_live();
  say("checkpoint " + analysis.checkpoint);
  std::fputs(train::to_text(analysis).c_str(), stdout);
  if (!arguments.json.empty()) {
    std::fflush(stdout);  // it may be the file
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
      "Measure gain and cost of head groups at a checkpoint, and the effect of one real step of "
      "each on the loss");
  command
      ->add_option(
          "run", options.path, "Folder of a run (uses its newest checkpoint) or of a checkpoint")
      ->required();
  command->add_option("--data", options.data, "Folder with shards; default: the run's");
  command->add_option(
      "--groups", options.groups,
      "Groupings of Q, K and V to measure in addition to packed and three-way, such as "
      "1,2:random,6:random; default: every size, random");
  command
      ->add_option(
          "--lr", options.lr,
          "Learning rate; default: that of the next step, or the peak if the run is finished")
      ->check(number_above_zero());
  command
      ->add_option(
          "--factors", options.factors,
          "Step sizes to try, as multiples of the learning rate; must include 1")
      ->delimiter(',')
      ->check(number_above_zero())
      ->capture_default_str();
  command->add_option("--layers", options.layers, "Layers to analyze, counted from 0; default: all")
      ->delimiter(',')
      ->check(whole_number(0, INT64_MAX));
  command
      ->add_option(
          "--sequences", options.sequences,
          "Number of sequences in the batch and in the held-out batch; default: a training batch")
      ->check(whole_number(1, INT64_MAX));
  command->add_option("--threads", options.threads, "Number of threads; default: the run's")
      ->check(whole_number(1, 1024));
  command->add_flag(
      "--estimate", arguments->estimate, "Use estimates instead of exact singular values: faster");
  command->add_option("--json", arguments->json, "Also write all numbers to this file");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace cli
