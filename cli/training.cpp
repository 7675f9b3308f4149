#include "cli/training.h"

#include <c10/util/StringUtil.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <csignal>
#include <cstdio>

#include "cli/terminal.h"

namespace cli {
namespace {

std::atomic<int> stop{0};  // the signal that requested a stop, or 0

void ask_to_stop(int signal) {
  stop = signal;
  if (signal == SIGINT) std::signal(signal, SIG_DFL);
}

std::string thousands(double value) {
  char text[32];
  std::snprintf(text, sizeof text, value < 9950 ? "%.1fk" : "%.0fk", value / 1000);
  return text;
}

// "loss 4.1234  12k tokens/s, 34% of GEMM peak, 1:23 left"
std::string facts(const train::Progress& now) {
  if (now.tokens_per_second == 0) return "";
  char text[128];
  std::snprintf(
      text, sizeof text, "loss %.4f  %s tokens/s, %.0f%% of GEMM peak, %s left", now.loss,
      thousands(now.tokens_per_second).c_str(), 100 * now.peak_fraction,
      clock_text(now.seconds_left).c_str());
  return text;
}

}  // namespace

std::string clock_text(double seconds) {
  const auto whole = static_cast<long long>(std::ceil(seconds));
  char text[32];
  if (whole >= 3600) {
    std::snprintf(
        text, sizeof text, "%lld:%02lld:%02lld", whole / 3600, whole / 60 % 60, whole % 60);
  } else {
    std::snprintf(text, sizeof text, "%lld:%02lld", whole / 60, whole % 60);
  }
  return text;
}

train::Listener make_listener(int64_t steps, int64_t log_interval) {
  train::Listener listener;
  listener.progress = [steps](const train::Progress& now) {
    char place[64];
    if (now.validating) {
      std::snprintf(place, sizeof place, "validating %3.0f%%  ", 100 * now.fraction);
    } else {
      std::snprintf(
          place, sizeof place, "step %.0f/%lld  ", std::floor(now.step),
          static_cast<long long>(steps));
    }
    show_live(now.fraction, place + facts(now));
  };
  listener.step = [steps, log_interval](const train::Progress& now) {
    const auto step = static_cast<int64_t>(now.step);
    const bool in_a_log = isatty(STDOUT_FILENO) == 0;
    if (in_a_log && (step % log_interval == 0 || step == steps)) {
      say(c10::str("step ", step, "/", steps, "  ", facts(now)));
    }
  };
  listener.validation = [steps](int64_t step, double loss) {
    char text[96];
    std::snprintf(
        text, sizeof text, "step %lld/%lld  validation loss %.4f", static_cast<long long>(step),
        static_cast<long long>(steps), loss);
    say(text);
  };
  listener.begin = [](const std::string& folder) { say("run " + folder); };
  listener.checkpoint = [](const std::string& path) { say("checkpoint " + path); };
  listener.note = [](const std::string& text) { say("note: " + text); };
  listener.stop_wanted = [] { return stop != 0; };
  return listener;
}

void catch_stop_signals() {
  struct sigaction action = {};
  action.sa_handler = ask_to_stop;
  action.sa_flags = SA_RESTART;
  sigset_t stops;  // a study starts its runs with some of these blocked
  sigemptyset(&stops);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) {
    struct sigaction before = {};
    sigaction(signal, nullptr, &before);
    const bool may_be_ignored = signal == SIGHUP || signal == SIGPIPE;
    if (may_be_ignored && before.sa_handler == SIG_IGN) continue;  // as nohup wants it
    sigaction(signal, &action, nullptr);
    sigaddset(&stops, signal);
  }
  sigprocmask(SIG_UNBLOCK, &stops, nullptr);
}

int stop_signal() { return stop; }

}  // namespace cli
