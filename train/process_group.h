#pragma once
// The processes that train one model together, as torchrun starts them: how they find each other, what they tell each
// other, and who is missing if one ends.

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "group_muon/exchange.h"

namespace train {

class Heartbeat;

struct Processes {
  int rank = 0;
  int count = 1;
  group_muon::ProcessGroup group = {};         // none if alone
  c10::intrusive_ptr<c10d::Store> store = {};  // of this start of the processes
  c10::intrusive_ptr<c10d::Store> common =
      {};                                     // of all their starts, if torchrun starts them again
  std::shared_ptr<Heartbeat> heartbeat = {};  // tells the others that this process lives
  std::chrono::seconds timeout = {};          // for collective functions

  bool alone() const { return count == 1; }
  bool writes() const { return rank == 0; }  // files, and the progress line
};

/// Thrown by a run if a collective function failed. `hint`: what to add to the words of failure.
struct ProcessLost : std::runtime_error {
  ProcessLost(const std::string& what, std::string added)
      : std::runtime_error(what), hint(std::move(added)) {}
  std::string hint;
};

/// Joins the processes named by torchrun's environment variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; alone
/// without them. `timeout` is how long a process waits for the others, here and in every exchange.
Processes join_processes(std::chrono::seconds timeout);

/// Whether torchrun started this process with others.
bool started_by_torchrun();

/// How many times torchrun has started these processes anew, after one of them ended.
int64_t restarts();

/// Threads for each process, so that those of this machine share its cores.
int64_t threads_per_process();

/// The part of `count` things that this process gets: [first, last). Parts follow each other in the order of ranks.
struct Range {
  int64_t first, last;
};
Range own_range(const Processes& processes, int64_t count);

/// Collective functions: all processes call them in the same order. They throw c10::DistBackendError if a process has
/// ended or does not answer. Alone they return what they were given.
///
/// What each process gives, in the order of ranks.
std::vector<std::vector<double>> gather(const Processes& processes, const std::vector<double>& own);
std::vector<std::string> gather(const Processes& processes, const std::string& own);
/// The sum of all vectors, which are of one size.
std::vector<int64_t> sum(const Processes& processes, const std::vector<int64_t>& own);
/// The tensor of the first process, written to that of all others.
void broadcast(const Processes& processes, const torch::Tensor& tensor);

/// A wish to stop, which any process may have. All see it soon. Neither waits for the store.
void ask_to_stop(const Processes& processes);
bool stop_asked(const Processes& processes);

/// What the first process keeps for the case that torchrun starts all anew. Without it, `text` is what it gets.
std::string kept_over_restarts(
    const Processes& processes, const std::string& key, const std::string& text);

/// Whether the processes had begun or taken over a run before torchrun started them anew. Only the first one says and asks.
void say_run_has_begun(const Processes& processes);
bool run_has_begun(const Processes& processes);

/// What to say when this process fails with `error`; "" if another process says it. Tells the others. After a collective
/// function failed, it finds out which process ended or does not answer, or what that one said.
std::string words_of_failure(const Processes& processes, const std::exception& error);

}  // namespace train
