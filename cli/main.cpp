// group-muon: one program, one subcommand a job.

#include <c10/util/Exception.h>
#include <malloc.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <limits>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/terminal.h"
#include "train/config.h"

namespace cli {
namespace {

// "there is no flag --qk-grop; did you mean --qk-group?"
std::string unknown_argument(const CLI::App& app) {
  const auto* command = app.get_subcommands().empty() ? &app : app.get_subcommands().front();
  const auto extras = app.remaining(/*recurse=*/true);
  const std::string& given = extras.front();
  const std::string name = given.substr(0, given.find('='));
  if (name.rfind("--", 0) != 0) return "'" + name + "' is one argument too many";
  std::vector<std::string> flags;
  for (const auto* option : command->get_options()) {
    for (const auto& flag : option->get_lnames()) flags.push_back("--" + flag);
  }
  const std::string near = train::nearest(name, flags);
  return "there is no flag " + name + (near.empty() ? "" : "; did you mean " + near + "?");
}

}  // namespace
}  // namespace cli

int main(int argc, char** argv) {
  // Activations come and go at every step: memory once had is kept, not given back and fetched anew.
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
  CLI::App app("Group Muon: from text to a trained GPT, with head groups as the paper has them");
  app.require_subcommand(1);
  app.get_formatter()->column_width(34);
  cli::add_tokenize(app);
  cli::add_train(app);
  cli::add_sample(app);
  try {
    app.parse(argc, argv);
    return 0;
  } catch (const CLI::ExtrasError& error) {
    std::fprintf(stderr, "group-muon: %s\n", cli::unknown_argument(app).c_str());
    return error.get_exit_code();
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  } catch (const c10::Error& error) {
    cli::end_live();
    std::fprintf(stderr, "group-muon: %s\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    cli::end_live();
    std::fprintf(stderr, "group-muon: %s\n", error.what());
  }
  return 1;
}
