// group-muon: one program with a subcommand for each task.

#include <fcntl.h>
#include <malloc.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <limits>
#include <string>

#include "cli/arguments.h"
#include "cli/commands.h"
#include "cli/terminal.h"
#include "train/errors.h"

namespace cli {
namespace {

constexpr int kWrongUse = 2;

// Opens /dev/null in place of standard streams that are closed. Otherwise the next file to be opened would get their
// numbers, and what is printed would end up in it.
void open_standard_streams() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(descriptor, F_GETFD) < 0) open("/dev/null", O_RDWR);  // gets the lowest free number
  }
}

// Prints the error as one line.
int complain(std::string message, int code) {
  end_live();
  const auto is_control = [](unsigned char c) { return c < 0x20 || c == 0x7f; };
  std::replace_if(message.begin(), message.end(), is_control, ' ');
  const std::string prefix = "group_muon: ";  // the library's
  if (message.rfind(prefix, 0) == 0) message.erase(0, prefix.size());
  std::fprintf(stderr, "group-muon: %s\n", message.c_str());
  return code;
}

// Flushes what was printed. A full disk behind standard output is an error like any other: what was printed is lost.
int finish(int code) {
  errno = 0;
  const bool flushed = std::fflush(stdout) == 0;
  if (flushed && std::ferror(stdout) == 0) return code;
  const std::string why = errno == 0 ? "" : std::string(": ") + std::strerror(errno);
  return complain("standard output cannot be written" + why, code == 0 ? 1 : code);
}

}  // namespace
}  // namespace cli

// Options that are declared wrongly should end the program. NOLINTNEXTLINE(bugprone-exception-escape)
int main(int argc, char** argv) {
  prctl(PR_SET_NAME, "group-muon");  // a study starts its runs by another name
  cli::open_standard_streams();
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
  cli::add_plan(app);
  app.name("group-muon");
  try {
    auto words = cli::checked_words(app, argc, argv);
    std::reverse(words.begin(), words.end());  // as the parser wants them
    app.parse(std::move(words));
    if (!app.get_subcommands().empty()) return cli::finish(0);
    std::fputs(app.help().c_str(), stderr);
    return cli::kWrongUse;
  } catch (const CLI::RuntimeError& error) {
    return error.get_exit_code();
  } catch (const CLI::Success& asked) {  // --help, --version
    return cli::finish(app.exit(asked));
  } catch (const CLI::ParseError& error) {
    return cli::complain(cli::words_of(error, app), cli::kWrongUse);
  } catch (const cli::WrongUse& error) {
    return cli::complain(error.what(), cli::kWrongUse);
  } catch (const std::exception& error) {
    return cli::complain(train::message_of(error), 1);
  }
}
