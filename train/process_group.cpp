#define USE_C10D_GLOO  // torch is built with Gloo, but its headers ask users to say so

#include "train/process_group.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <charconv>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <string_view>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "train/errors.h"

namespace train {
namespace {

using torch::Tensor;
using Clock = std::chrono::steady_clock;
using StorePointer = c10::intrusive_ptr<c10d::Store>;

constexpr auto kBeat = std::chrono::seconds(1);
// A process whose heart has not beaten for so long has ended, or stands still.
constexpr auto kSilence = std::chrono::seconds(4);
// How often the wishes of others are looked up, which takes a message to the store and back.
constexpr auto kLook = std::chrono::milliseconds(200);

constexpr const char* kStopKey = "stop";
std::string beat_key(int rank) { return "beat/" + std::to_string(rank); }
std::string failure_key(int rank) { return "failure/" + std::to_string(rank); }

void set_text(c10d::Store& store, const std::string& key, const std::string& text) {
  store.set(key, std::vector<uint8_t>(text.begin(), text.end()));
}

// The text at a key, or "" if it is not there or the store cannot be reached.
std::string text_at(c10d::Store& store, const std::string& key) {
  try {
    if (!store.check({key})) return "";
    const auto bytes = store.get(key);
    return {bytes.begin(), bytes.end()};
  } catch (const std::exception&) {
    return "";
  }
}

std::string text_of(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::string variable(const char* name) {
  const std::string value = text_of(name);
  TORCH_CHECK_VALUE(
      !value.empty(), "torchrun's variable ", name,
      " is missing; start the processes as torchrun --nproc-per-node 4 --no-python group-muon …");
  return value;
}

int64_t number(const char* name, int64_t least, int64_t most) {
  const std::string text = variable(name);
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  TORCH_CHECK_VALUE(
      error == std::errc() && end == text.data() + text.size() && value >= least && value <= most,
      name, " = ", text, " should be a number from ", least, " to ", most);
  return value;
}

// The store that processes find each other by. Under torchrun its agent serves it already; else the first process does.
c10::intrusive_ptr<c10d::Store> open_store(int rank, int count, std::chrono::seconds timeout) {
  const std::string host = variable("MASTER_ADDR");
  const auto port = static_cast<uint16_t>(number("MASTER_PORT", 1, 65535));
  const bool served = text_of("TORCHELASTIC_USE_AGENT_STORE") == "True";
  c10d::TCPStoreOptions options;
  options.port = port;
  options.isServer = !served && rank == 0;
  options.numWorkers = served ? std::nullopt : std::optional<std::size_t>(count);
  options.timeout = timeout;
  try {
    return c10::make_intrusive<c10d::TCPStore>(host, options);
  } catch (const std::exception& error) {
    TORCH_CHECK(
        false, "process ", rank, " of ", count, " could not ",
        options.isServer ? "listen at " : "reach the first process at ", host, ":", port,
        options.isServer ? "; is another program using the port?"
                         : "; is it running, and is the address right?");
  }
}

// Waits for a collective function.
void wait(const Processes& processes, const c10::intrusive_ptr<c10d::Work>& work) {
  try {
    work->wait();
  } catch (const std::exception& error) {
    C10_THROW_ERROR(
        DistBackendError, c10::str(
                              "process ", processes.rank, " of ", processes.count,
                              " could not reach another process: ", error.what()));
  }
}

// Row by row what each process gives; all give as much.
Tensor gather_rows(const Processes& processes, const Tensor& own) {
  std::vector<std::vector<Tensor>> rows(1);
  for (int i = 0; i < processes.count; ++i) rows[0].push_back(at::empty_like(own));
  std::vector<Tensor> sent = {own};
  wait(processes, processes.group->allgather(rows, sent));
  return at::stack(rows[0]);
}

// Vectors of different lengths.
template <typename T>
std::vector<std::vector<T>> gather_vectors(
    const Processes& processes, const std::vector<T>& own, at::ScalarType type) {
  const auto count = static_cast<int64_t>(own.size());
  const Tensor counts = gather_rows(processes, at::tensor({count}, at::kLong)).flatten();
  const auto longest = counts.max().item<int64_t>();
  Tensor padded = at::zeros({std::max<int64_t>(1, longest)}, type);
  std::copy(own.begin(), own.end(), padded.data_ptr<T>());
  const Tensor rows = gather_rows(processes, padded);
  std::vector<std::vector<T>> all;
  for (int i = 0; i < processes.count; ++i) {
    const auto* first = rows[i].data_ptr<T>();
    all.emplace_back(first, first + counts[i].item<int64_t>());
  }
  return all;
}

// Ranks in words: "process 2", "processes 1 and 3".
std::string names_of(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "process " : "processes ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    text += i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

// What another process says it failed with, or "".
std::string failure_of_another(const Processes& processes) {
  for (int rank = 0; rank < processes.count; ++rank) {
    if (rank == processes.rank) continue;
    const std::string why = text_at(*processes.store, failure_key(rank));
    if (!why.empty()) return c10::str("process ", rank, " of ", processes.count, " failed: ", why);
  }
  return "";
}

// Whether the store that all meet at still answers.
bool answers(c10d::Store& store) {
  try {
    store.check({kStopKey});
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

// The processes whose hearts do not beat.
std::vector<int> silent(const Processes& processes) {
  std::vector<std::string> before(processes.count);
  std::set<int> quiet;
  for (int rank = 0; rank < processes.count; ++rank) {
    if (rank == processes.rank) continue;
    before[rank] = text_at(*processes.store, beat_key(rank));
    quiet.insert(rank);
  }
  for (const auto end = Clock::now() + kSilence; !quiet.empty() && Clock::now() < end;) {
    std::this_thread::sleep_for(kBeat / 4);
    for (auto rank = quiet.begin(); rank != quiet.end();) {
      const bool beats = text_at(*processes.store, beat_key(*rank)) != before[*rank];
      rank = beats ? quiet.erase(rank) : std::next(rank);
    }
  }
  return {quiet.begin(), quiet.end()};
}

}  // namespace

// Counts in the store, from a thread of its own, while the process lives.
class Heartbeat {
 public:
  Heartbeat(StorePointer store, int rank)
      : thread_([this, store = std::move(store), rank] {
          std::unique_lock lock(mutex_);
          for (int64_t beat = 0; !ended_; ++beat) {
            try {
              set_text(*store, beat_key(rank), std::to_string(beat));
            } catch (const std::exception&) {
              return;  // nobody is left to see it
            }
            wake_.wait_for(lock, kBeat);
          }
        }) {}
  ~Heartbeat() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable wake_;
  bool ended_ = false;
  std::thread thread_;  // last: it uses the others
};

Processes join_processes(std::chrono::seconds timeout) {
  if (!started_by_torchrun()) return {};
  const auto count = static_cast<int>(number("WORLD_SIZE", 1, 1 << 16));
  const auto rank = static_cast<int>(number("RANK", 0, count - 1));
  const auto store_of_start = [&](const StorePointer& store) {
    return c10::make_intrusive<c10d::PrefixStore>(
        "group_muon/" + std::to_string(restarts()), store);
  };
  const auto base = open_store(rank, count, timeout);
  const auto store = store_of_start(base);
  const auto options = c10d::ProcessGroupGloo::Options::create_default(timeout);
  c10::intrusive_ptr<c10d::ProcessGroupGloo> backend;
  try {
    backend = c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, count, options);
  } catch (const std::exception& error) {
    TORCH_CHECK(
        false, "process ", rank, " of ", count, " did not find all others within ", timeout.count(),
        " seconds; are they all running? (", message_of(error), ")");
  }
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, count);
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO, backend);
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
  // A connection of its own: the other one may be waiting.
  auto heartbeat = std::make_shared<Heartbeat>(store_of_start(base->clone()), rank);
  return {
      .rank = rank,
      .count = count,
      .group = std::move(group),
      .store = store,
      .common = c10::make_intrusive<c10d::PrefixStore>("group_muon", base),
      .heartbeat = std::move(heartbeat)};
}

bool started_by_torchrun() {
  return !text_of("WORLD_SIZE").empty() && number("WORLD_SIZE", 1, 1 << 16) > 1;
}

int64_t restarts() {
  return text_of("TORCHELASTIC_RESTART_COUNT").empty()
             ? 0
             : number("TORCHELASTIC_RESTART_COUNT", 0, INT32_MAX);
}

int64_t threads_per_process() {
  const int64_t cores = std::max(1U, std::thread::hardware_concurrency());
  if (!started_by_torchrun() || text_of("LOCAL_WORLD_SIZE").empty()) return cores;
  return std::max<int64_t>(1, cores / number("LOCAL_WORLD_SIZE", 1, 1 << 16));
}

Range own_range(const Processes& processes, int64_t count) {
  return {count * processes.rank / processes.count, count * (processes.rank + 1) / processes.count};
}

std::vector<std::vector<double>> gather(
    const Processes& processes, const std::vector<double>& own) {
  if (processes.alone()) return {own};
  return gather_vectors(processes, own, at::kDouble);
}

std::vector<std::string> gather(const Processes& processes, const std::string& own) {
  if (processes.alone()) return {own};
  std::vector<std::string> texts;
  const auto bytes =
      gather_vectors(processes, std::vector<uint8_t>(own.begin(), own.end()), at::kByte);
  for (const auto& text : bytes) texts.emplace_back(text.begin(), text.end());
  return texts;
}

std::vector<int64_t> sum(const Processes& processes, const std::vector<int64_t>& own) {
  if (processes.alone()) return own;
  const Tensor all = gather_rows(processes, at::tensor(own, at::kLong)).sum(0);
  return {all.data_ptr<int64_t>(), all.data_ptr<int64_t>() + all.numel()};
}

void broadcast(const Processes& processes, const Tensor& tensor) {
  if (processes.alone()) return;
  const torch::NoGradGuard no_grad;
  std::vector<Tensor> sent = {tensor.detach().contiguous()};
  wait(processes, processes.group->broadcast(sent));
  if (processes.rank != 0) tensor.copy_(sent[0]);
}

void ask_to_stop(const Processes& processes) {
  if (!processes.alone()) set_text(*processes.store, kStopKey, "yes");
}

bool stop_asked(const Processes& processes) {
  if (processes.alone()) return false;
  static auto next = Clock::now();
  if (Clock::now() < next) return false;
  next = Clock::now() + kLook;
  return !text_at(*processes.store, kStopKey).empty();
}

std::string text_of_first_start(const Processes& processes, const std::string& text) {
  constexpr const char* kKey = "first";
  if (processes.alone()) return text;
  const std::string first = text_at(*processes.common, kKey);
  if (first.empty()) set_text(*processes.common, kKey, text);
  return first.empty() ? text : first;
}

std::string words_of_failure(const Processes& processes, const std::exception& error) {
  const std::string own = message_of(error);
  if (processes.alone()) return own;
  const auto* in_run = dynamic_cast<const ProcessLost*>(&error);
  if (in_run == nullptr && dynamic_cast<const c10::DistBackendError*>(&error) == nullptr) {
    try {
      set_text(*processes.store, failure_key(processes.rank), own);
    } catch (const std::exception&) {
      return own;  // the others have ended
    }
    // What all find out at the same time, the first says for all.
    const auto said = [&] { return text_at(*processes.store, failure_key(0)); };
    for (const auto end = Clock::now() + kBeat; !processes.writes() && Clock::now() < end;) {
      if (said() == own) return "";
      std::this_thread::sleep_for(kLook / 4);
    }
    return processes.writes()
               ? own
               : c10::str("process ", processes.rank, " of ", processes.count, ": ", own);
  }
  const std::string self = c10::str("process ", processes.rank, " of ", processes.count, ": ");
  std::string why = failure_of_another(processes);
  if (why.empty() && !answers(*processes.store)) {
    why = "process 0, which all others meet at, has ended";
  } else if (why.empty()) {
    const auto quiet = silent(processes);
    why = failure_of_another(processes);  // which may take a moment
    if (why.empty() && !quiet.empty()) {
      why = names_of(quiet) + (quiet.size() == 1 ? " has ended or does" : " have ended or do") +
            " not answer";
    }
  }
  return self + (why.empty() ? own : why) + (in_run == nullptr ? "" : in_run->hint);
}

}  // namespace train
