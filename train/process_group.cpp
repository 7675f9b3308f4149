#define USE_C10D_GLOO  // torch is built with Gloo, but its headers ask users to say so

#include "train/process_group.h"

#include <ATen/ATen.h>
#include <c10/util/Logging.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <condition_variable>
#include <cstdlib>
#include <functional>
#include <future>
#include <mutex>
#include <optional>
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

// How often a process says that it lives, and looks for the wishes of others.
constexpr auto kBeat = std::chrono::milliseconds(500);
// A process whose heart has not beaten for so long has ended, or stands still.
constexpr auto kSilence = std::chrono::seconds(4);
// How long to wait for the store when a process has to say why it fails.
constexpr auto kPatience = std::chrono::seconds(10);

constexpr const char* kStopKey = "stop";
constexpr const char* kBegunKey = "begun";
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
  options.waitWorkers = false;  // joining waits for them, and can name those that are missing
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
      const std::string now = text_at(*processes.store, beat_key(*rank));
      const bool beats = !now.empty() && now != before[*rank];
      rank = beats ? quiet.erase(rank) : std::next(rank);
    }
  }
  return {quiet.begin(), quiet.end()};
}

// Why a collective function failed.
std::string why_lost(const Processes& processes) {
  std::string why = failure_of_another(processes);
  if (!why.empty()) return why;
  if (!answers(*processes.store)) return "process 0, which all others meet at, has ended";
  const auto quiet = silent(processes);
  why = failure_of_another(processes);  // which may take a moment
  if (!why.empty()) return why;
  if (quiet.empty()) {
    return c10::str(
        "another process did not answer within ", processes.timeout.count(),
        " seconds, though all live; is one much slower? --timeout sets the seconds");
  }
  return names_of(quiet) + (quiet.size() == 1 ? " has ended or does" : " have ended or do") +
         " not answer";
}

// Tells the others why this process fails. Returns "" if the first process says the same: what all find out at the same
// time, it says for all.
std::string own_failure(const Processes& processes, const std::string& own) {
  try {
    set_text(*processes.store, failure_key(processes.rank), own);
  } catch (const std::exception&) {
    return own;  // the others have ended
  }
  for (const auto end = Clock::now() + 2 * kBeat; !processes.writes() && Clock::now() < end;) {
    if (text_at(*processes.store, failure_key(0)).starts_with(own)) return "";
    std::this_thread::sleep_for(kBeat / 10);
  }
  return own;
}

// The result, if it comes in time. A store that does not answer cannot be asked to give up.
std::optional<std::string> within(
    std::chrono::seconds limit, const std::function<std::string()>& find) {
  auto task = std::make_shared<std::packaged_task<std::string()>>(find);
  auto result = task->get_future();
  std::thread([task] { (*task)(); }).detach();
  if (result.wait_for(limit) != std::future_status::ready) return {};
  return result.get();
}

}  // namespace

// A thread with a connection of its own to the store: says that the process lives, passes on its wish to stop and sees
// those of others. So the process itself never waits for the store while it trains.
class Heartbeat {
 public:
  Heartbeat(StorePointer store, int rank)
      : shared_(std::make_shared<Shared>()), thread_(beat, shared_, std::move(store), rank) {}
  // A store that does not answer holds up the thread, but not the end of the program.
  ~Heartbeat() {
    std::unique_lock lock(shared_->mutex);
    shared_->ended = true;
    shared_->changed.notify_all();
    const bool done = shared_->changed.wait_for(lock, kSilence, [&] { return shared_->done; });
    lock.unlock();
    done ? thread_.join() : thread_.detach();
  }
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  void wish_to_stop() {
    const std::lock_guard lock(shared_->mutex);
    shared_->wish = true;
    shared_->changed.notify_all();
  }
  bool stop_asked() const { return shared_->asked; }

 private:
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    bool ended = false, done = false, wish = false;
    std::atomic<bool> asked{false};
  };

  static void beat(const std::shared_ptr<Shared>& shared, const StorePointer& store, int rank) {
    bool said = false;
    std::unique_lock lock(shared->mutex);
    for (int64_t count = 0; !shared->ended; ++count) {
      const bool say = shared->wish && !said;
      lock.unlock();
      try {
        set_text(*store, beat_key(rank), std::to_string(count));
        if (say) set_text(*store, kStopKey, "yes");
        said |= say;
        if (!shared->asked && store->check({kStopKey})) shared->asked = true;
      } catch (const std::exception&) {  // nobody is left to see it
        lock.lock();
        break;
      }
      lock.lock();
      shared->changed.wait_for(
          lock, kBeat, [&] { return shared->ended || (shared->wish && !said); });
    }
    shared->done = true;
    shared->changed.notify_all();
  }

  std::shared_ptr<Shared> shared_;
  std::thread thread_;
};

Processes join_processes(std::chrono::seconds timeout) {
  if (!started_by_torchrun()) return {};
  const auto count = static_cast<int>(number("WORLD_SIZE", 1, 1 << 16));
  const auto rank = static_cast<int>(number("RANK", 0, count - 1));
  const auto store_of_start = [&](const StorePointer& store) {
    return c10::make_intrusive<c10d::PrefixStore>(
        "group_muon/" + std::to_string(restarts()), store);
  };
  // c10d reports each lost connection with a stack trace. We say it in words.
  if (text_of("TORCH_CPP_LOG_LEVEL").empty()) FLAGS_caffe2_log_level = 3;
  const auto base = open_store(rank, count, timeout);
  const auto store = store_of_start(base);
  auto heartbeat = std::make_shared<Heartbeat>(store_of_start(base->clone()), rank);
  const auto options = c10d::ProcessGroupGloo::Options::create_default(timeout);
  c10::intrusive_ptr<c10d::ProcessGroupGloo> backend;
  try {
    backend = c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, count, options);
  } catch (const std::exception&) {
    std::vector<int> missing;
    for (int other = 0; other < count; ++other) {
      if (other != rank && text_at(*store, beat_key(other)).empty()) missing.push_back(other);
    }
    TORCH_CHECK(
        false, "process ", rank, " of ", count, " waited ", timeout.count(), " seconds for ",
        missing.empty() ? "the others" : names_of(missing), "; were all started?");
  }
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, count);
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO, backend);
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
  return {
      .rank = rank,
      .count = count,
      .group = std::move(group),
      .store = store,
      .common = c10::make_intrusive<c10d::PrefixStore>("group_muon", base),
      .heartbeat = std::move(heartbeat),
      .timeout = timeout};
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
  if (!processes.alone()) processes.heartbeat->wish_to_stop();
}

bool stop_asked(const Processes& processes) {
  return !processes.alone() && processes.heartbeat->stop_asked();
}

std::string kept_over_restarts(
    const Processes& processes, const std::string& key, const std::string& text) {
  if (processes.alone()) return text;
  const std::string kept = text_at(*processes.common, key);
  if (kept.empty()) set_text(*processes.common, key, text);
  return kept.empty() ? text : kept;
}

void say_run_has_begun(const Processes& processes) {
  if (!processes.alone()) set_text(*processes.common, kBegunKey, "yes");
}

bool run_has_begun(const Processes& processes) {
  return !processes.alone() && !text_at(*processes.common, kBegunKey).empty();
}

std::string words_of_failure(const Processes& processes, const std::exception& error) {
  std::string own = message_of(error);
  if (processes.alone()) return own;
  const auto* in_run = dynamic_cast<const ProcessLost*>(&error);
  const bool lost =
      in_run != nullptr || dynamic_cast<const c10::DistBackendError*>(&error) != nullptr;
  const auto words = within(kPatience, [processes, own, lost] {
    return lost ? why_lost(processes) : own_failure(processes, own);
  });
  const std::string self =
      processes.writes() && !lost
          ? ""
          : c10::str("process ", processes.rank, " of ", processes.count, ": ");
  if (!lost) {
    if (words && words->empty()) return "";
    return self + own;
  }
  // It may serve the store, in which the others are still looking.
  if (processes.writes()) std::this_thread::sleep_for(kSilence);
  return self + words.value_or("process 0, which all others meet at, does not answer") +
         (in_run == nullptr ? "" : in_run->hint);
}

}  // namespace train
