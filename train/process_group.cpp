#define USE_C10D_GLOO  // torch is built with Gloo, but its headers ask users to say so

#include "train/process_group.h"

#include <charconv>
#include <cstdlib>
#include <string_view>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

namespace train {
namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  TORCH_CHECK_VALUE(
      value != nullptr, "torchrun's variable ", name,
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
  const char* agent = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  const bool served = agent != nullptr && std::string_view(agent) == "True";
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

}  // namespace

Processes join_processes(std::chrono::seconds timeout) {
  if (std::getenv("WORLD_SIZE") == nullptr) return {};
  const auto count = static_cast<int>(number("WORLD_SIZE", 1, 1 << 16));
  const auto rank = static_cast<int>(number("RANK", 0, count - 1));
  if (count == 1) return {};
  const char* attempt = std::getenv("TORCHELASTIC_RESTART_COUNT");
  const auto store = c10::make_intrusive<c10d::PrefixStore>(
      std::string("group_muon/") + (attempt == nullptr ? "0" : attempt),
      open_store(rank, count, timeout));
  const auto options = c10d::ProcessGroupGloo::Options::create_default(timeout);
  const auto backend = c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, count, options);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, count);
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO, backend);
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
  return {rank, count, std::move(group)};
}

}  // namespace train
