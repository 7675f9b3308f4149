// group-muon report: study folder → page, tables and figures.

#include "study/report.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "cli/commands.h"
#include "cli/terminal.h"
#include "study/process.h"
#include "train/errors.h"

namespace cli {
namespace {

namespace fs = std::filesystem;

struct ReportArguments {
  std::string folder, out, python;
  bool no_figures = false;
};

// plot.py of the installed program, else that of the source folder.
std::string find_plot() {
  const fs::path program = fs::read_symlink("/proc/self/exe");
  const fs::path installed = program.parent_path().parent_path() / "share/group-muon/plot.py";
  return fs::exists(installed) ? installed.string() : GROUP_MUON_PLOT;
}

std::string find_python(const std::string& given) {
  if (!given.empty()) return given;
  return fs::exists(GROUP_MUON_PYTHON) ? GROUP_MUON_PYTHON : "python3";
}

void run(const ReportArguments& arguments) {
  const auto folder = study::open_folder(arguments.folder);
  const std::string out = arguments.out.empty() ? folder.path + "/report" : arguments.out;
  const auto report = study::write_report(folder, out);
  for (const auto& problem : report.problems) say("note: " + problem);
  std::fputs(report.summary.c_str(), stdout);
  for (const auto& file : report.files) say("wrote " + file);
  if (arguments.no_figures) return;
  const std::string python = find_python(arguments.python), plot = find_plot();
  std::string reason;
  try {
    const int code = study::run_program({python, plot, "study", out});
    if (code == 0) return;
    if (code > study::kSignal)
      reason = " (killed by signal " + std::to_string(code - study::kSignal) + ")";
  } catch (const std::exception& error) {
    reason = " (" + train::message_of(error) + ")";
  }
  TORCH_CHECK(
      false, "the figures were not drawn", reason,
      "; draw them with a Python that has matplotlib: ", shell_word(python), " ", shell_word(plot),
      " study ", shell_word(out));
}

}  // namespace

void add_report(CLI::App& app) {
  auto arguments = std::make_shared<ReportArguments>();
  auto* command = app.add_subcommand(
      "report",
      "Write a report on a study, finished or not: a page that opens offline, tables and figures");
  command->add_option("folder", arguments->folder, "The study's folder")
      ->type_name("FOLDER")
      ->required();
  command->add_option("--out", arguments->out, "Output folder; default: FOLDER/report")
      ->type_name("FOLDER");
  command->add_flag("--no-figures", arguments->no_figures, "Do not draw figures (SVG and PNG)");
  command
      ->add_option(
          "--python", arguments->python,
          "Python with matplotlib, for the figures; default: the project's own")
      ->type_name("PROGRAM");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace cli
