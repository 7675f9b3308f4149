#pragma once
// A training run as the commands show it: its lines, and the signals that stop it.

#include <string>

#include "train/train.h"

namespace cli {

/// Says what happens: a live line on a terminal, else a line every `log_interval` steps.
train::Listener make_listener(int64_t steps, int64_t log_interval);

/// From now on SIGINT and SIGTERM ask for a checkpoint, and so does one that came before; a second SIGINT ends the
/// program at once. A second SIGTERM does not: batch systems and studies may send it to all they know.
void catch_stop_signals();
/// The signal that asked for it, or 0.
int stop_signal();

/// "1:23", "2:03:04"
std::string clock_text(double seconds);

}  // namespace cli
