#pragma once
// The processes that train one model together, as torchrun starts them.

#include <chrono>
#include <string>

#include "group_muon/exchange.h"

namespace train {

struct Processes {
  int rank = 0;
  int count = 1;
  group_muon::ProcessGroup group = {};  // none if alone

  bool alone() const { return count == 1; }
  bool writes() const { return rank == 0; }  // files, and the progress line
};

/// Joins the processes named by torchrun's environment variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; alone
/// without them. `timeout` is how long a process waits for the others, here and in every exchange.
Processes join_processes(std::chrono::seconds timeout);

}  // namespace train
