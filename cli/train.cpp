// group-muon train: shards → trained model in a run folder.

#include "train/train.h"

#include <c10/util/StringUtil.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <memory>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/terminal.h"
#include "cli/training.h"

namespace cli {
namespace {

struct TrainArguments {
  std::string file;
  const CLI::Option* resume = nullptr;
  train::Options flags;
  bool profile = false;
};

std::string folder_by_time() {
  const std::time_t now = std::time(nullptr);
  char text[64];
  std::strftime(text, sizeof text, "runs/%Y%m%d-%H%M%S", std::localtime(&now));
  return text;
}

// Prints where the time of the steps went, largest part first.
void say_profile(const train::Outcome& outcome) {
  if (outcome.profiled_steps == 0) return;
  std::vector<std::pair<double, const char*>> parts;
  double rest = outcome.profiled_seconds;
  for (size_t i = 0; i < gpt::kPartNames.size(); ++i) {
    const double seconds = outcome.profile[static_cast<gpt::Part>(i)];
    if (seconds > 0) parts.emplace_back(seconds, gpt::kPartNames[i]);
    rest -= seconds;
  }
  std::sort(parts.rbegin(), parts.rend());
  parts.emplace_back(rest, "norms, metrics, other");
  parts.emplace_back(outcome.profiled_seconds, "a step");
  say("                          ms   share");
  for (const auto& [seconds, name] : parts) {
    char line[96];
    std::snprintf(
        line, sizeof line, "%-22s %7.2f  %5.1f%%", name,
        1e3 * seconds / static_cast<double>(outcome.profiled_steps),
        100 * seconds / outcome.profiled_seconds);
    say(line);
  }
}

void run(const TrainArguments& arguments) {
  train::Options options;
  if (!arguments.file.empty()) options = train::read_options(arguments.file);
  options.insert(options.end(), arguments.flags.begin(), arguments.flags.end());
  catch_stop_signals();
  train::Outcome outcome;
  if (arguments.resume == nullptr || arguments.resume->empty()) {
    train::Config config = train::configure(options);
    if (config.out.empty()) config.out = folder_by_time();
    outcome = train::train(config, make_listener(config.steps, config.log_interval));
  } else {
    const train::Run run = train::open_run(arguments.resume->as<std::string>(), options);
    outcome = train::resume(run, make_listener(run.config.steps, run.config.log_interval));
  }
  end_live();
  if (arguments.profile) say_profile(outcome);
  if (outcome.stopped) {
    say(c10::str(
        "stopped after step ", outcome.step, "; resume with: group-muon train --resume ",
        shell_word(outcome.folder)));
    throw CLI::RuntimeError(128 + stop_signal());
  }
}

}  // namespace

void add_train(CLI::App& app) {
  auto arguments = std::make_shared<TrainArguments>();
  auto* command = app.add_subcommand(
      "train",
      "Train a GPT with AdamW and Group Muon. Each option that its help lists in a section is also "
      "a key in that section of the configuration file");
  command
      ->add_option(
          "config", arguments->file, "Configuration file (TOML), such as configs/small.toml")
      ->type_name("FILE");
  arguments->resume = command
                          ->add_option(
                              "--resume",
                              "Folder of a run to resume from its newest checkpoint, or of the "
                              "checkpoint to resume from")
                          ->type_name("RUN");
  command->add_flag(
      "--profile", arguments->profile, "Show at the end where the time of a step went");
  const train::Config defaults;
  for (const auto& key : train::config_keys()) {
    const std::string name = key.name, value = train::get(defaults, key);
    auto* option = command
                       ->add_option_function<std::string>(
                           "--" + name,
                           [arguments, name](const std::string& text) {
                             arguments->flags.emplace_back(name, text);
                           },
                           key.help)
                       ->group(key.section)
                       ->take_last()
                       ->type_name(value.empty() ? "" : "[" + value + "]");
    // Only these may go without a value: a bare --nesterov means true.
    if (train::type_of(key) == train::Type::kSwitch) option->expected(0, 1);
  }
  command->callback([arguments] { run(*arguments); });
}

}  // namespace cli
