#pragma once
// What commands that train share: output lines, and the signals that stop a run.

#include <string>

#include "train/train.h"

namespace cli {

/// Prints progress: a live line on a terminal, else one line every `log_interval` steps.
train::Listener make_listener(int64_t steps, int64_t log_interval);

/// From now on SIGINT, SIGTERM, SIGHUP (the terminal is closed) and SIGPIPE (nobody reads the output any more), also
/// one that is already pending, request a checkpoint and a stop. SIGHUP and SIGPIPE stay ignored if they were, as by
/// nohup. A second SIGINT ends the program at once. A second one of the others does not, because batch systems and
/// studies may both send one.
void catch_stop_signals();
/// The signal that requested the stop, or 0.
int stop_signal();

/// "1:23", "2:03:04"
std::string clock_text(double seconds);

}  // namespace cli
