#include "study/runner.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <torch/cuda.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <map>
#include <thread>

#include "study/process.h"
#include "train/errors.h"
#include "train/files.h"

namespace study {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr const char* kLog = "/log.txt";

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Writes the reason to the log. Async-signal-safe calls only.
[[noreturn]] void give_up(const char* what) {
  const char* why = std::strerror(errno);
  for (const char* text : {"group-muon: ", what, ": ", why, "\n"}) {
    if (write(STDERR_FILENO, text, std::strlen(text)) < 0) break;
  }
  _exit(127);
}

// Starts a run's process; its output goes to the run's log.txt.
pid_t start_process(
    const std::string& log, std::vector<std::string> words, const std::string& gpus) {
  std::vector<std::string> variables;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    if (gpus.empty() || std::strncmp(*variable, "CUDA_VISIBLE_DEVICES=", 21) != 0) {
      variables.emplace_back(*variable);
    }
  }
  if (!gpus.empty()) variables.push_back("CUDA_VISIBLE_DEVICES=" + gpus);
  const auto arguments = pointers_of(words), environment = pointers_of(variables);
  // Signals are blocked until the run is ready for them. Otherwise an early one would kill the process.
  sigset_t stops, before;
  sigemptyset(&stops);
  sigaddset(&stops, SIGTERM);
  sigaddset(&stops, SIGINT);
  sigprocmask(SIG_BLOCK, &stops, &before);
  const pid_t parent = getpid(), child = fork();
  if (child != 0) sigprocmask(SIG_SETMASK, &before, nullptr);
  TORCH_CHECK(child >= 0, "cannot start a process: ", std::strerror(errno));
  if (child > 0) return child;
  // Until exec, async-signal-safe calls only: other threads of the parent may have held locks.
  setpgid(0, 0);  // Ctrl-C goes to the study, which then stops its runs
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getppid() != parent) _exit(kRunFailed);
  const int output = open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  const int input = open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (output < 0 || input < 0) give_up("log.txt cannot be written");
  dup2(input, STDIN_FILENO);
  dup2(output, STDOUT_FILENO);
  dup2(output, STDERR_FILENO);
  // This very program, even if its file has been replaced in the meantime.
  execve("/proc/self/exe", arguments.data(), environment.data());
  give_up("cannot start the program");
}

// Why a process ended, for runs that left no error.txt.
std::string reason(int status, const std::string& run_folder) {
  const char* more = fs::exists(run_folder + kLog) ? "; see log.txt" : "";
  if (WIFSIGNALED(status)) {
    const int signal = WTERMSIG(status);
    return c10::str(
        "ended by signal ", signal, " (", strsignal(signal), ")",
        signal == SIGKILL ? ", perhaps out of memory" : "", more);
  }
  return c10::str("ended with exit code ", WEXITSTATUS(status), more);
}

// Whether a process with this exit code was told to stop.
bool was_stopped(int code) {
  return code == 128 + SIGTERM || code == 128 + SIGINT || code == 128 + SIGHUP;
}

// All runs of a study and the processes that execute them.
class Runner {
 public:
  Runner(
      const Folder& folder, const Workers& workers, const RunCommand& command, bool retry,
      const StudyListener& listener);
  StudyProgress run();

 private:
  struct Item {
    const PlannedRun* run;
    std::string path;
    double work;  // tokens
    RunStatus status;
    bool retry = false;   // try once more if it has failed
    bool killed = false;  // has been killed once, not by us
    bool gone = false;    // another process has removed it from the study
    pid_t process = 0;    // our process, if it is running here
    size_t slot = 0;
    Clock::time_point start = {};
  };
  void start(Item& item, size_t slot);
  void reap(Item& item);
  void look(Item& item);
  void fail(Item& item, const std::string& error);
  void tell_to_stop();
  bool care_for(Item& item, bool look_around, bool stopping);
  double work_done() const;
  StudyProgress progress() const;
  bool is_stopping() const { return listener_.stop_signal && listener_.stop_signal() != 0; }

  const Folder& folder_;
  const RunCommand& command_;
  const StudyListener& listener_;
  std::vector<Item> items_;
  std::vector<std::string> gpus_;  // CUDA_VISIBLE_DEVICES by slot; empty: not set
  std::vector<bool> taken_;        // which slots are in use
  Clock::time_point start_ = Clock::now();
  double work_at_start_ = 0;
};

Runner::Runner(
    const Folder& folder, const Workers& workers, const RunCommand& command, bool retry,
    const StudyListener& listener)
    : folder_(folder),
      command_(command),
      listener_(listener),
      taken_(static_cast<size_t>(workers.jobs), false) {
  for (const auto& run : folder.plan) {
    const auto config = train::configure(run.options);
    Item item{&run, folder_of(folder, run), 0, status_of(folder, run)};
    item.work = static_cast<double>(config.steps * config.batch * config.context);
    item.retry = retry;
    if (item.status.state == RunState::kFailed && retry) item.status.state = RunState::kWaiting;
    items_.push_back(std::move(item));
  }
  if (workers.device == "cuda") {
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    gpus_ = gpus_of_jobs(
        visible == nullptr ? "" : visible, static_cast<int64_t>(torch::cuda::device_count()),
        workers.jobs);
  }
  work_at_start_ = work_done();
}

void Runner::start(Item& item, size_t slot) {
  train::make_folder(item.path);
  auto words = command_(item.run->name, item.retry);
  item.retry = false;
  item.process =
      start_process(item.path + kLog, std::move(words), gpus_.empty() ? "" : gpus_[slot]);
  item.status.state = RunState::kRunning;
  item.slot = slot;
  item.start = Clock::now();
  taken_[slot] = true;
  if (listener_.begin) listener_.begin(*item.run);
}

void Runner::fail(Item& item, const std::string& error) {
  item.status.error = read_error(item.path);
  if (item.status.error.empty()) {  // else keep the run's own
    record_error(item.path, error);
    item.status.error = error;
  }
  item.status.state = RunState::kFailed;
  if (listener_.failed) listener_.failed(*item.run, item.status.error);
}

// Updates the run if its process has ended.
void Runner::reap(Item& item) {
  int status = 0;
  if (item.process == 0 || waitpid(item.process, &status, WNOHANG) == 0) return;
  item.process = 0;
  taken_[item.slot] = false;
  const int signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  item.status = status_of(folder_, *item.run);
  if (item.status.state == RunState::kFinished) {
    if (listener_.finished) {
      listener_.finished(*item.run, item.status.loss, seconds_since(item.start));
    }
  } else if (code == kRunElsewhere) {
    item.status.state = RunState::kRunning;
  } else if (code == kRunUnknown) {
    item.gone = true;
  } else if (was_stopped(code) || was_stopped(128 + signal)) {
    item.status.state = RunState::kWaiting;
  } else if (signal == SIGKILL && !item.killed) {  // will resume from its checkpoint
    item.killed = true;
    item.status.state = RunState::kWaiting;
  } else {
    fail(item, reason(status, item.path));
  }
}

// Updates a run that we are not running.
void Runner::look(Item& item) {
  item.status = status_of(folder_, *item.run);
  if (item.status.state == RunState::kFailed && item.retry) item.status.state = RunState::kWaiting;
}

double Runner::work_done() const {
  double done = 0;
  for (const auto& item : items_) done += item.work * item.status.fraction;
  return done;
}

StudyProgress Runner::progress() const {
  StudyProgress now;
  double all = 0, left = 0;
  std::map<std::string, std::vector<double>> losses;
  for (const auto& item : items_) {
    if (item.gone) continue;
    const auto state = item.status.state;
    ++now.planned;
    now.finished += state == RunState::kFinished ? 1 : 0;
    now.running += state == RunState::kRunning ? 1 : 0;
    now.failed += state == RunState::kFailed ? 1 : 0;
    all += item.work;
    if (state == RunState::kWaiting || state == RunState::kRunning) {
      left += item.work * (1 - item.status.fraction);
    }
    if (state == RunState::kFinished && item.run->variant.empty()) {
      losses[item.run->setting].push_back(item.status.loss);
    }
  }
  now.fraction = all > 0 ? 1 - left / all : 1;
  const double done = work_done() - work_at_start_, seconds = seconds_since(start_);
  if (done > 0 && seconds > 2) now.seconds_left = left / (done / seconds);
  size_t most = 0;
  for (const auto& [setting, values] : losses) {
    double mean = 0;
    for (const double value : values) mean += value / static_cast<double>(values.size());
    if (values.size() < most) continue;
    if (values.size() == most && mean >= now.best_loss) continue;
    most = values.size();
    now.best_setting = setting;
    now.best_loss = mean;
    now.best_seeds = static_cast<int64_t>(most);
  }
  return now;
}

void Runner::tell_to_stop() {
  for (const auto& item : items_) {
    if (item.process != 0) kill(item.process, SIGTERM);
  }
}

// Updates a run and starts it if a slot is free. Returns whether it is still unfinished.
bool Runner::care_for(Item& item, bool look_around, bool stopping) {
  const auto is = [&](RunState state) { return item.status.state == state; };
  if (item.gone || is(RunState::kFinished) || is(RunState::kFailed)) return false;
  if (look_around && item.process == 0) look(item);
  if (look_around && item.process != 0) item.status.fraction = fraction_done(folder_, *item.run);
  const auto slot = std::find(taken_.begin(), taken_.end(), false);
  if (is(RunState::kWaiting) && !stopping && slot != taken_.end()) {
    try {
      start(item, static_cast<size_t>(slot - taken_.begin()));
    } catch (const std::exception& error) {  // the other runs continue
      fail(item, train::message_of(error));
    }
  }
  return is(RunState::kWaiting) || is(RunState::kRunning);
}

StudyProgress Runner::run() {
  bool told = false;
  auto last_look = Clock::now();
  for (;;) {
    for (auto& item : items_) reap(item);
    const bool stopping = is_stopping();
    if (stopping && !told) tell_to_stop();
    told = stopping;
    const bool look_around = seconds_since(last_look) > 1;
    if (look_around) last_look = Clock::now();
    bool unfinished = false, ours = false;
    for (auto& item : items_) {
      unfinished = care_for(item, look_around, stopping) || unfinished;
      ours = ours || item.process != 0;
    }
    const StudyProgress now = progress();
    if (listener_.progress) listener_.progress(now);
    if (stopping ? !ours : !unfinished) return now;
    std::this_thread::sleep_for(milliseconds(100));
  }
}

}  // namespace

RunEnd run_here(
    const Folder& folder, const PlannedRun& run, int64_t threads, const std::string& device,
    bool retry, const train::Listener& listener) {
  const std::string path = folder_of(folder, run);
  train::make_folder(path);
  const auto lock = train::wait_for_lock(path, 0);
  if (!lock) return RunEnd::kElsewhere;
  const auto drop_checkpoints = [&] {
    if (!folder.study.keep_checkpoints && fs::exists(path + train::kCheckpointsFolder)) {
      train::delete_folder(path + train::kCheckpointsFolder);
    }
  };
  const bool damaged = has_result(path) && status_of(folder, run).state != RunState::kFinished;
  if (has_result(path) && !damaged) {
    drop_checkpoints();  // it may have been killed before doing this
    return RunEnd::kFinished;
  }
  if (!retry && (damaged || !read_error(path).empty()))
    return RunEnd::kFailedBefore;  // perhaps while we waited for the lock
  forget_error(path);
  if (damaged) forget_result(path);
  try {
    check_data(folder, read_data(folder));
    const auto config = config_of(folder, run, threads, device);
    const bool begun = train::has_run(path);
    const auto outcome =
        begun
            ? train::resume(
                  train::open_run(
                      // All keys, so that one that was removed from the study file is noticed.
                      path, train::options_of(train::filled_in(config, train::config_of_run(path))),
                      lock),
                  listener)
            : train::train(config, listener, lock);
    if (outcome.stopped) return RunEnd::kStopped;
    record_result(path, outcome.validation_loss);
    drop_checkpoints();
    return RunEnd::kFinished;
  } catch (const train::FolderBusy&) {
    throw;  // others keep the study's files busy: no failure of this run
  } catch (const std::exception& error) {
    record_error(path, train::message_of(error));
    throw;
  }
}

StudyProgress run_all(
    const Folder& folder, const Workers& workers, const RunCommand& command, bool retry,
    const StudyListener& listener) {
  expect_children();
  return Runner(folder, workers, command, retry, listener).run();
}

}  // namespace study
