// group-muon: one program, one subcommand a job.

#include <c10/util/Exception.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>

#include "cli/commands.h"
#include "cli/terminal.h"

int main(int argc, char** argv) {
  CLI::App app("Group Muon: from text to a trained GPT, with head groups as the paper has them");
  app.require_subcommand(1);
  app.get_formatter()->column_width(34);
  cli::add_tokenize(app);
  try {
    app.parse(argc, argv);
    return 0;
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
