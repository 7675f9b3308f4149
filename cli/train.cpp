// group-muon train: shards → trained model in a run folder.

#include "train/train.h"

#include <c10/util/StringUtil.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <ctime>
#include <memory>
#include <utility>
#include <vector>

#include "cli/arguments.h"
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
  int64_t timeout = 600;  // seconds
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

// The run to resume: the one that --resume names, or the one that these processes had begun to train before torchrun
// started them anew. "": a new run.
std::string run_to_resume(
    const std::string& given, const std::string& out, const train::Processes& processes) {
  if (train::restarts() == 0 || !train::run_has_begun(processes)) return given;
  return given.empty() ? out : train::locate(given).run;
}

train::Outcome train_or_resume(
    const TrainArguments& arguments, const train::Options& options,
    const train::Processes& processes) {
  train::Config config = train::configure(options);
  std::string resumed;
  if (processes.writes()) {
    if (config.out.empty()) config.out = folder_by_time();
    config.out = train::kept_over_restarts(processes, "out", config.out);
    resumed = arguments.resume->empty() ? "" : arguments.resume->as<std::string>();
    resumed = run_to_resume(resumed, config.out, processes);
  }
  resumed = train::gather(processes, resumed)[0];
  const auto listener_for = [&](const train::Config& its) {
    auto listener = make_listener(its.steps, its.log_interval);
    if (processes.writes()) return listener;
    return train::Listener{.stop_wanted = listener.stop_wanted};
  };
  if (!processes.alone() && processes.writes()) {
    say(c10::str(processes.count, " processes"));
  }
  if (resumed.empty()) return train::train(config, listener_for(config), nullptr, processes);
  const train::Run run =
      train::prepared_by_first(processes, [&] { return train::open_run(resumed, options); });
  return train::resume(run, listener_for(run.config), processes);
}

void run(const TrainArguments& arguments) {
  train::Options options;
  if (!arguments.file.empty()) options = train::read_options(arguments.file);
  options.insert(options.end(), arguments.flags.begin(), arguments.flags.end());
  const auto processes = train::join_processes(std::chrono::seconds(arguments.timeout));
  catch_stop_signals();
  train::Outcome outcome;
  try {
    outcome = train_or_resume(arguments, options, processes);
  } catch (const std::exception& error) {
    if (processes.alone()) throw;
    const std::string words = train::words_of_failure(processes, error);
    if (words.empty()) throw CLI::RuntimeError(1);  // another process says it
    throw std::runtime_error(words);
  }
  end_live();
  if (arguments.profile && processes.writes()) say_profile(outcome);
  if (!outcome.stopped) return;
  if (processes.writes()) {
    say(c10::str(
        "stopped after step ", outcome.step, "; resume with: group-muon train --resume ",
        shell_word(outcome.folder)));
  }
  const int signal = stop_signal();
  throw CLI::RuntimeError(128 + (signal == 0 ? SIGTERM : signal));  // 0: another process's
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
  command
      ->add_option(
          "--timeout", arguments->timeout,
          "Seconds that processes which train together wait for each other")
      ->check(whole_number(1, 86400))
      ->capture_default_str();
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
