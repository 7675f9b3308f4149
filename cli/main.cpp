// group-muon: one program with a subcommand for each task.

#include <malloc.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <exception>
#include <limits>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/terminal.h"
#include "train/config.h"
#include "train/errors.h"

namespace cli {
namespace {

constexpr int kWrongUse = 2;

// "there is no flag --qk-grop; did you mean --qk-group?"
std::string unknown_argument(const CLI::App& app) {
  const auto commands = app.get_subcommands();
  const auto extras = app.remaining(/*recurse=*/true);
  const std::string& given = extras.front();
  const std::string name = given.substr(0, given.find('='));
  const bool is_flag = name.rfind('-', 0) == 0;
  if (!is_flag && !commands.empty()) return "unexpected argument '" + name + "'";
  std::vector<std::string> known;
  if (is_flag) {
    const CLI::App* innermost = &app;
    while (!innermost->get_subcommands().empty()) innermost = innermost->get_subcommands().front();
    for (const auto* option : innermost->get_options()) {
      for (const auto& flag : option->get_lnames()) known.push_back("--" + flag);
    }
  } else {
    for (const auto* command : app.get_subcommands({})) known.push_back(command->get_name());
  }
  const std::string near = train::nearest(name, known);
  return "there is no " + std::string(is_flag ? "flag " : "command ") + name +
         (near.empty() ? "; see --help" : "; did you mean " + near + "?");
}

// Prints the error as one line.
int complain(std::string message, int code) {
  end_live();
  const std::string prefix = "group_muon: ";  // the library's
  if (message.rfind(prefix, 0) == 0) message.erase(0, prefix.size());
  std::fprintf(stderr, "group-muon: %s\n", message.c_str());
  return code;
}

}  // namespace
}  // namespace cli

// Options that are declared wrongly should end the program. NOLINTNEXTLINE(bugprone-exception-escape)
int main(int argc, char** argv) {
  // Activations are allocated and freed at every step: keep freed memory instead of returning it to the system.
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
  std::signal(
      SIGXFSZ, SIG_IGN);  // a limit on file sizes is an error of the write, which names the file
  CLI::App app("Group Muon: train GPTs from raw text with Muon on groups of attention heads");
  app.require_subcommand(0, 1);
  app.get_formatter()->column_width(34);
  app.set_version_flag("--version", "group-muon " GROUP_MUON_VERSION);
  cli::add_tokenize(app);
  cli::add_train(app);
  cli::add_sample(app);
  cli::add_analyze(app);
  cli::add_study(app);
  cli::add_report(app);
  try {
    app.parse(argc, argv);
    if (!app.get_subcommands().empty()) return 0;
    std::fputs(app.help().c_str(), stderr);
    return cli::kWrongUse;
  } catch (const CLI::ExtrasError&) {
    return cli::complain(cli::unknown_argument(app), cli::kWrongUse);
  } catch (const CLI::RuntimeError& error) {
    return error.get_exit_code();
  } catch (const CLI::Success& asked) {  // --help, --version
    return app.exit(asked);
  } catch (const CLI::ArgumentMismatch& error) {
    const std::string message = error.what();  // "--steps: 1 required …"
    return cli::complain(message.substr(0, message.find(':')) + " needs a value", cli::kWrongUse);
  } catch (const CLI::ParseError& error) {
    return cli::complain(error.what(), cli::kWrongUse);
  } catch (const std::exception& error) {
    return cli::complain(train::message_of(error), 1);
  }
}
