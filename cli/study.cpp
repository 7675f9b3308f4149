// group-muon study: many training runs from one file, on this machine or as a Slurm array job.

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "cli/arguments.h"
#include "cli/commands.h"
#include "cli/terminal.h"
#include "cli/training.h"
#include "study/cost.h"
#include "study/runner.h"
#include "study/settings.h"
#include "study/slurm.h"
#include "study/text.h"
#include "train/files.h"

namespace cli {
namespace {

namespace fs = std::filesystem;
using study::format;

struct StudyArguments {
  std::string file, data, out;
  int64_t seeds = 0;  // 0: the study's
  study::Workers workers;
  bool list = false, dry_run = false, retry = false, slurm = false;
  std::string slurm_options;
};

struct RunArguments {
  std::string folder, run;
  study::Workers workers;
  bool unless_failed = false;
};

// Builds `group-muon study run FOLDER RUN`, the command that add_run() below declares.
study::RunCommand run_command(
    const std::string& program, const std::string& folder, const study::Workers& workers) {
  return [=](const std::string& run, bool retry) {
    std::vector<std::string> words = {
        program, "study", "run", folder, run, "--threads", std::to_string(workers.threads)};
    if (!workers.device.empty()) words.insert(words.end(), {"--device", workers.device});
    if (!retry) words.emplace_back("--unless-failed");
    return words;
  };
}

// More seeds for every setting; those of [more-seeds] that have no more than that need no mention.
study::Study with_seeds(study::Study study, int64_t seeds) {
  TORCH_CHECK_VALUE(
      seeds >= study.seeds, "--seeds adds seeds: the study has ", study.seeds, " already, not ",
      seeds);
  study.seeds = seeds;
  std::erase_if(study.more_seeds, [&](const auto& entry) { return entry.second <= seeds; });
  return study;
}

// The study to run: an existing one in its folder, or that of a study file, in --out.
study::Folder folder_of(const StudyArguments& arguments) {
  if (fs::is_directory(arguments.file)) {
    TORCH_CHECK_VALUE(
        arguments.data.empty() && arguments.out.empty(), "the study in '", arguments.file,
        "' already has its data and folder; remove --data and --out, which are for study files");
    study::Folder folder = study::open_folder(arguments.file);
    return arguments.seeds == 0
               ? folder
               : study::planned_folder(with_seeds(folder.study, arguments.seeds), folder.path);
  }
  TORCH_CHECK_VALUE(
      fs::exists(arguments.file), "there is no file or folder '", arguments.file,
      "'; give a study file, the folder of a study, or 'run' for a single run");
  study::Study study = study::read_study(arguments.file);
  if (arguments.seeds > 0) study = with_seeds(std::move(study), arguments.seeds);
  if (!arguments.data.empty()) study.data = fs::absolute(arguments.data).lexically_normal();
  const std::string out =
      arguments.out.empty() ? "runs/" + fs::path(arguments.file).stem().string() : arguments.out;
  if (arguments.list) return study::planned_folder(study, out);
  TORCH_CHECK_VALUE(
      !study.data.empty(), "no data given; set --data to a folder made by 'group-muon tokenize'");
  TORCH_CHECK_VALUE(fs::is_directory(study.data), "there is no folder '", study.data, "'");
  return study::planned_folder(study, out);
}

std::string show(const study::RunStatus& status) {
  switch (status.state) {
    case study::RunState::kFinished:
      return format("%.4f", status.loss);
    case study::RunState::kRunning:
      return format("running, %.0f%%", 100 * status.fraction);
    case study::RunState::kFailed:
      return "failed: " + status.error;
    default:
      return status.fraction > 0 ? format("stopped, %.0f%%", 100 * status.fraction) : "-";
  }
}

void list(const study::Folder& folder) {
  say("   #  run                                validation loss or state");
  for (size_t i = 0; i < folder.plan.size(); ++i) {
    const auto& run = folder.plan[i];
    const std::string difference = study::difference_of(folder, run);
    const std::string state = difference.empty() ? show(study::status_of(folder, run))
                                                 : "differs from the study: " + difference;
    say(format("%4zu  %-34s %s", i, run.name.c_str(), state.c_str()));
  }
  int64_t cells = 0;
  const auto& names = folder.study.settings;
  const auto has = [&](const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  for (const auto& cell : study::table1_cells()) cells += has(cell.setting) ? 1 : 0;
  say(format(
      "%zu runs, %zu settings, which fill %lld of the 37 cells of Table 1%s", folder.plan.size(),
      names.size(), static_cast<long long>(cells),
      has("three-way") ? "; three-way is not in the paper" : ""));
}

std::string duration(double seconds) {
  return clock_text(seconds) + (seconds < 3600 ? " minutes" : " hours");
}

void show_cost(const study::Folder& folder, const study::Workers& workers) {
  constexpr double kGiga = 1 << 30;
  const auto cost = study::estimate_cost(folder, workers.device, workers.jobs, workers.threads);
  say(format(
      "%lld of %lld runs are left: %.3g tokens, %.3g floating-point operations",
      static_cast<long long>(cost.left), static_cast<long long>(cost.runs), cost.tokens,
      cost.flops));
  say(format(
      "about %s, %lld at a time with %lld %s each (%s one after the other), estimated from a few "
      "steps timed on this machine",
      duration(cost.seconds).c_str(), static_cast<long long>(workers.jobs),
      static_cast<long long>(workers.threads), workers.threads == 1 ? "thread" : "threads",
      duration(cost.job_seconds).c_str()));
  say(format(
      "about %.1f GB of memory, and %.1f GB on disk for checkpoints", cost.memory / kGiga,
      cost.disk / kGiga));
}

// "12 of 138 done, 2 running, 1 failed, 3:12:00 left, best qk-1 4.7012 (n = 8)". A narrow terminal cuts off the end.
std::string summary(const study::StudyProgress& now) {
  std::string text = format(
      "%lld of %lld done, %lld running, %lld failed", static_cast<long long>(now.finished),
      static_cast<long long>(now.planned), static_cast<long long>(now.running),
      static_cast<long long>(now.failed));
  if (now.seconds_left > 0) text += ", " + clock_text(now.seconds_left) + " left";
  if (!now.best_setting.empty()) {
    text += format(
        ", best %s %.4f (n = %lld)", now.best_setting.c_str(), now.best_loss,
        static_cast<long long>(now.best_seeds));
  }
  return text;
}

study::StudyListener make_study_listener() {
  using Clock = std::chrono::steady_clock;
  study::StudyListener listener;
  auto last = std::make_shared<Clock::time_point>(Clock::now());
  listener.progress = [last](const study::StudyProgress& now) {
    const bool stopping = stop_signal() != 0;
    show_live(
        now.fraction, stopping ? "stopping: runs are saving checkpoints (Ctrl-C again to quit now)"
                               : summary(now));
    // A line every few minutes in a log.
    if (isatty(STDERR_FILENO) == 0 && Clock::now() - *last > std::chrono::minutes(5)) {
      say(summary(now));
      *last = Clock::now();
    }
  };
  listener.begin = [](const study::PlannedRun& run) {
    if (isatty(STDERR_FILENO) == 0) say("begin    " + run.name);
  };
  listener.finished = [](const study::PlannedRun& run, double loss, double seconds) {
    say(format("finished %-34s %.4f  %s", run.name.c_str(), loss, clock_text(seconds).c_str()));
  };
  listener.failed = [](const study::PlannedRun& run, const std::string& error) {
    say("failed   " + run.name + ": " + error);
  };
  listener.stop_signal = stop_signal;
  return listener;
}

void run_all(const study::Folder& folder, const study::Workers& workers, bool retry) {
  say(format(
      "study in %s, %lld at a time with %lld %s each", folder.path.c_str(),
      static_cast<long long>(workers.jobs), static_cast<long long>(workers.threads),
      workers.threads == 1 ? "thread" : "threads"));
  const auto command = run_command("group-muon", folder.path, workers);  // as ps shows it
  const auto end = study::run_all(folder, workers, command, retry, make_study_listener());
  end_live();
  study::StudyProgress last = end;
  last.seconds_left = 0;
  say(summary(last));
  const std::string place = shell_word(folder.path);
  if (stop_signal() != 0) {
    say("stopped; resume with: group-muon study " + place);
    throw CLI::RuntimeError(128 + stop_signal());
  }
  if (end.failed > 0) {
    say("group-muon study " + place +
        " --list shows why runs failed; after fixing the cause, retry with: group-muon study " +
        place + " --retry");
  }
  say("write a report with: group-muon report " + place);
  if (end.failed > 0) throw CLI::RuntimeError(1);
}

// Slurm's machines are not this one, so nothing is chosen by this machine's cores and memory.
void submit(const study::Folder& folder, const StudyArguments& arguments) {
  auto workers = arguments.workers;
  if (workers.device.empty()) workers.device = train::configure(folder.study.options).device;
  workers.threads = std::max<int64_t>(1, workers.threads);
  const auto command = run_command(
      fs::read_symlink("/proc/self/exe"), fs::absolute(folder.path).lexically_normal(), workers);
  const std::string script =
      study::slurm_script(folder, workers, command, arguments.retry, arguments.slurm_options);
  if (arguments.dry_run) {
    std::fputs(script.c_str(), stdout);
    return;
  }
  const std::string file = fs::absolute(folder.path + "/study.sbatch").lexically_normal();
  train::replace_file(file, script);
  say("wrote " + file);
  say(study::submit(file));
}

void run(const StudyArguments& arguments) {
  TORCH_CHECK_VALUE(
      !arguments.file.empty(),
      "no study given; give a file such as configs/table1-small.toml or the folder of a study");
  const bool runs = !arguments.list && !arguments.dry_run && !arguments.slurm;
  if (runs) catch_stop_signals();
  const auto folder = folder_of(arguments);
  study::check_configs(folder);
  if (arguments.list) return list(folder);
  const uint32_t checksum = study::read_data(folder);  // before anything is written
  if (arguments.dry_run) {
    study::refuse_changes(folder);
  } else {
    study::begin(folder);
    study::check_data(folder, checksum);
    if (const auto others = study::runs_without_plan(folder); !others.empty()) {
      say(format(
          "note: %zu of the runs in the folder are not in the study, such as %s; they are ignored",
          others.size(), others.front().c_str()));
    }
  }
  if (arguments.slurm) return submit(folder, arguments);
  const auto workers = study::choose_workers(folder, arguments.workers);
  if (arguments.dry_run) return show_cost(folder, workers);
  run_all(folder, workers, arguments.retry);
}

// Finds a run by its name or by its number in --list.
const study::PlannedRun& find_run(const study::Folder& folder, const std::string& name) {
  const bool is_number = !name.empty() && name.find_first_not_of("0123456789") == std::string::npos;
  if (!is_number) return study::find_run(folder.plan, name);
  const size_t number = name.size() < 10 ? std::stoul(name) : folder.plan.size();
  TORCH_CHECK_VALUE(
      number < folder.plan.size(), "the study has no run ", name, ", only 0 to ",
      folder.plan.size() - 1);
  return folder.plan[number];
}

const study::PlannedRun& run_of(const study::Folder& folder, const std::string& name) {
  try {
    return find_run(folder, name);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "group-muon: %s\n", error.what_without_backtrace());
    throw CLI::RuntimeError(study::kRunUnknown);
  }
}

void run_one(const RunArguments& arguments) {
  const auto folder = study::open_folder(arguments.folder);
  const auto& planned = run_of(folder, arguments.run);
  const auto config =
      study::config_of(folder, planned, arguments.workers.threads, arguments.workers.device);
  catch_stop_signals();
  const auto elsewhere = [](const std::string& why) {
    std::fprintf(stderr, "group-muon: %s\n", why.c_str());
    throw CLI::RuntimeError(study::kRunElsewhere);
  };
  auto end = study::RunEnd::kElsewhere;
  try {
    end = study::run_here(
        folder, planned, arguments.workers.threads, arguments.workers.device,
        !arguments.unless_failed, make_listener(config.steps, config.log_interval));
  } catch (const train::FolderBusy& busy) {
    elsewhere(busy.what());
  }
  end_live();
  if (end == study::RunEnd::kElsewhere) elsewhere("another process is running " + planned.name);
  if (end == study::RunEnd::kFailedBefore) throw CLI::RuntimeError(study::kRunFailed);
  if (end == study::RunEnd::kStopped) {
    say("stopped; resume with the same command");
    throw CLI::RuntimeError(128 + stop_signal());
  }
  say(planned.name + " is finished: " + show(study::status_of(folder, planned)));
}

void add_workers(CLI::App& command, study::Workers& workers, const std::string& threads) {
  command.add_option("--threads", workers.threads, threads)
      ->check(whole_number(0, 4096))
      ->type_name("[0]");
  command.add_option("--device", workers.device, "cpu or cuda; default: the study's")
      ->check(one_of({"cpu", "cuda"}))
      ->type_name("NAME");
}

void add_run(CLI::App& study) {
  auto arguments = std::make_shared<RunArguments>();
  auto* command = study.add_subcommand("run", "Start or resume a single run of a study");
  command->add_option("folder", arguments->folder, "The study's folder")
      ->type_name("FOLDER")
      ->required();
  command->add_option("run", arguments->run, "Name of the run, or its number in --list")
      ->type_name("RUN")
      ->required();
  add_workers(*command, arguments->workers, "Number of threads; 0: one per core");
  command->add_flag(
      "--unless-failed", arguments->unless_failed, "Skip the run if it has failed before");
  command->callback([arguments] { run_one(*arguments); });
}

}  // namespace

void add_study(CLI::App& app) {
  auto arguments = std::make_shared<StudyArguments>();
  auto* command = app.add_subcommand(
      "study",
      "Train many settings with many seeds, several runs at a time. A study can be stopped or "
      "killed at any moment and resumed");
  command
      ->add_option(
          "study", arguments->file,
          "Study file, such as configs/table1-small.toml, or the folder of a study to resume")
      ->type_name("FILE|FOLDER");
  command->add_option("--data", arguments->data, "Folder with shards, made by group-muon tokenize")
      ->type_name("FOLDER");
  command
      ->add_option(
          "--out", arguments->out, "Folder of the study; default: runs/ plus the file's name")
      ->type_name("FOLDER");
  command
      ->add_option(
          "--seeds", arguments->seeds,
          "Raise the number of seeds of each setting to this; finished runs are kept")
      ->check(whole_number(1, 1000))
      ->type_name("NUMBER");
  command
      ->add_option(
          "--jobs", arguments->workers.jobs,
          "Number of runs at a time; 0: one per core if memory allows, or one per GPU")
      ->check(whole_number(0, 4096))
      ->type_name("[0]");
  add_workers(
      *command, arguments->workers,
      "Threads per run; 0: the cores divided among the runs, or one with --slurm");
  command->add_flag("--list", arguments->list, "Only show the plan and the state of each run");
  command->add_flag("--dry-run", arguments->dry_run, "Only estimate the cost of what is left");
  command->add_flag("--retry", arguments->retry, "Run failed runs again");
  command->add_flag(
      "--slurm", arguments->slurm,
      "Submit an array job to Slurm instead, one task per run; with --dry-run only show the "
      "script");
  command
      ->add_option(
          "--slurm-options", arguments->slurm_options,
          "More options for sbatch, such as \"--time=2:00:00\"; empty: none")
      ->type_name(kAnyText);
  add_run(*command);
  command->callback([command, arguments] {
    if (command->get_subcommands().empty()) run(*arguments);
  });
}

}  // namespace cli
