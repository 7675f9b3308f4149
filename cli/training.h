#pragma once
// What commands that train share: output lines, and the signals that stop a run.

#include <string>

#include "train/train.h"

namespace cli {

/// Prints progress: a live line on a terminal, else one line every `log_interval` steps.
train::Listener make_listener(int64_t steps, int64_t log_interval);

/// From now on SIGINT and SIGTERM, including one that is already pending, request a checkpoint and a stop. A second
/// SIGINT ends the program at once. A second SIGTERM does not, because batch systems and studies may both send one.
void catch_stop_signals();
/// The signal that requested the stop, or 0.
int stop_signal();

/// "1:23", "2:03:04"
std::string clock_text(double seconds);

}  // namespace cli
