// group-muon report: a study's folder → a page, tables and figures.

#include "study/report.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstring>
#include <filesystem>
#include <memory>

#include "cli/commands.h"
#include "cli/terminal.h"

namespace cli {
namespace {

namespace fs = std::filesystem;

struct ReportArguments {
  std::string folder, out, python;
  bool no_figures = false;
};

// Where the program is installed, or in the source folder.
std::string find_plot() {
  const fs::path program = fs::read_symlink("/proc/self/exe");
  const fs::path installed = program.parent_path().parent_path() / "share/group-muon/plot.py";
  return fs::exists(installed) ? installed.string() : GROUP_MUON_PLOT;
}

std::string find_python(const std::string& given) {
  if (!given.empty()) return given;
  return fs::exists(GROUP_MUON_PYTHON) ? GROUP_MUON_PYTHON : "python3";
}

// Its output is ours.
int run_program(std::vector<std::string> words) {
  std::vector<char*> arguments;
  for (auto& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  pid_t process = 0;
  const int error =
      posix_spawnp(&process, arguments[0], nullptr, nullptr, arguments.data(), environ);
  TORCH_CHECK(error == 0, "cannot start ", words[0], ": ", std::strerror(error));
  int status = 0;
  while (waitpid(process, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

void run(const ReportArguments& arguments) {
  const auto folder = study::open_folder(arguments.folder);
  const std::string out = arguments.out.empty() ? folder.path + "/report" : arguments.out;
  const auto report = study::write_report(folder, out);
  for (const auto& problem : report.problems) say("note: " + problem);
  for (const auto& file : report.files) say("wrote " + file);
  if (arguments.no_figures) return;
  const std::string python = find_python(arguments.python), plot = find_plot();
  if (run_program({python, plot, "study", out}) != 0) {
    say("note: the figures were not drawn; with a Python that has matplotlib: " +
        shell_word(python) + " " + shell_word(plot) + " study " + shell_word(out));
    throw CLI::RuntimeError(1);
  }
}

}  // namespace

void add_report(CLI::App& app) {
  auto arguments = std::make_shared<ReportArguments>();
  auto* command = app.add_subcommand(
      "report",
      "Make a page that opens offline of a study, finished or not, with tables and figures");
  command->add_option("folder", arguments->folder, "The study's folder")
      ->type_name("FOLDER")
      ->required();
  command->add_option("--out", arguments->out, "Where to; by default FOLDER/report")
      ->type_name("FOLDER");
  command->add_flag("--no-figures", arguments->no_figures, "No SVG and PNG files");
  command
      ->add_option(
          "--python", arguments->python,
          "One that has matplotlib, for the figures; by default the project's")
      ->type_name("PROGRAM");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace cli
