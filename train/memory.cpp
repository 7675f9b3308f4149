#include "train/memory.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <limits>
#include <sstream>

namespace train {
namespace {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

// The number after a word, as in "MemAvailable: 1234 kB" or "inactive_file 1234"; -1 if there is none.
int64_t number_after(const std::string& path, const std::string& word) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string first;
    int64_t number = -1;
    if (words >> first && first == word && words >> number) return number;
  }
  return -1;
}

// The only number in a file; -1 if there is none, as in "max".
int64_t number_in(const std::string& path) {
  std::ifstream file(path);
  int64_t number = -1;
  return file >> number ? number : -1;
}

// Names of the files that limit a cgroup's memory, by version.
struct Names {
  const char* limit;
  const char* usage;
  const char* inactive;
  const char* active;
};
constexpr Names kVersion1 = {
    "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file"};
constexpr Names kVersion2 = {"memory.max", "memory.current", "inactive_file", "active_file"};

// What a cgroup and those around it leave. `mount` may show only a part of the hierarchy, as in a container.
int64_t left_by(const std::string& mount, std::string group, const Names& names) {
  int64_t least = kUnlimited;
  for (;;) {
    const std::string folder = mount + (group == "/" ? "" : group) + "/";
    const int64_t limit = number_in(folder + names.limit), usage = number_in(folder + names.usage);
    if (limit >= 0 && usage >= 0) {
      const std::string facts = folder + "memory.stat";  // files in memory give way
      const int64_t files = std::max<int64_t>(0, number_after(facts, names.inactive)) +
                            std::max<int64_t>(0, number_after(facts, names.active));
      least = std::min(least, std::max<int64_t>(0, limit - std::max<int64_t>(0, usage - files)));
    }
    if (group.size() <= 1) return least;
    group.erase(std::max<size_t>(1, group.rfind('/')));
  }
}

int64_t left_by_cgroups(const std::string& root) {
  const std::string mounts = root + "/sys/fs/cgroup";
  int64_t least = kUnlimited;
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // "4:memory:/group" or "0::/group"
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = c10::str(",", line.substr(first + 1, second - first - 1), ",");
    const std::string group = line.substr(second + 1);
    if (controllers == ",,") {
      least = std::min(least, left_by(mounts, group, kVersion2));
      least = std::min(least, left_by(mounts + "/unified", group, kVersion2));
    } else if (controllers.find(",memory,") != std::string::npos) {
      least = std::min(least, left_by(mounts + "/memory", group, kVersion1));
    }
  }
  return least;
}

// Sines and cosines of all positions.
double rotary_bytes(const Config& config) {
  return 4 * static_cast<double>(config.context) * static_cast<double>(config.width) /
         static_cast<double>(config.heads);
}

std::string gigabytes(double bytes) {
  char text[64];
  std::snprintf(text, sizeof text, bytes < 1e15 ? "%.1f GB" : "%.2g GB", bytes / (1 << 30));
  return text;
}

void require(double bytes, const char* what, const Config& config) {
  const auto available = static_cast<double>(available_memory().value_or(kUnlimited));
  TORCH_CHECK_VALUE(
      bytes <= available, what, " needs at least ", gigabytes(bytes), " of memory, and ",
      gigabytes(available), " are available here. The model has layers = ", config.layers,
      ", width = ", config.width, ", vocabulary = ", config.vocabulary,
      ", context = ", config.context, ", micro-batch = ", config.micro_batch,
      ". Choose a smaller one or a larger machine");
}

}  // namespace

std::optional<int64_t> available_memory(const std::string& root) {
  const std::string facts = root + "/proc/meminfo";
  const int64_t kilobytes = number_after(facts, "MemAvailable:");
  const int64_t swap = std::max<int64_t>(0, number_after(facts, "SwapFree:"));
  const int64_t machine = kilobytes < 0 ? kUnlimited : (kilobytes + swap) * 1024;
  const int64_t least = std::min(machine, left_by_cgroups(root));
  return least == kUnlimited ? std::nullopt : std::optional(least);
}

double block_weights(const Config& config) {
  const auto width = static_cast<double>(config.width), heads = static_cast<double>(config.heads);
  const auto key_heads = static_cast<double>(config.kv_heads == 0 ? config.heads : config.kv_heads);
  const double qkv = width + 2 * width * key_heads / heads;
  return static_cast<double>(config.layers) * width * (qkv + 9 * width);
}

double embedding_weights(const Config& config) {
  return static_cast<double>(config.vocabulary) * static_cast<double>(config.width);
}

double least_model_memory(const Config& config) {
  return 4 * (block_weights(config) + embedding_weights(config)) + rotary_bytes(config);
}

double least_training_memory(const Config& config) {
  if (config.device != "cpu") return least_model_memory(config);  // which starts on the CPU
  // Bytes per weight: itself, its gradient and the momentum, or AdamW's two averages.
  const double weights = 12 * block_weights(config) + 16 * embedding_weights(config);
  // Per token, layer and unit of width, in bf16: two norms, Q, the heads' output and four of the MLP.
  const double activations = 2 * 8 * static_cast<double>(config.layers) *
                             static_cast<double>(config.width) *
                             static_cast<double>(std::max<int64_t>(1, config.micro_batch)) *
                             static_cast<double>(config.context);
  return weights + activations + rotary_bytes(config);
}

void require_training_memory(const Config& config) {
  require(least_training_memory(config), "training", config);
}

void require_model_memory(const Config& config) {
  require(least_model_memory(config), "the model", config);
}

}  // namespace train
