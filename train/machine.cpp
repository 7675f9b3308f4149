#include "train/machine.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/version.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "train/commit.h"  // made by the build

namespace train {
namespace {

std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    const auto at = line.find(": ");
    if (at != std::string::npos) return line.substr(at + 2);
  }
  return "unknown";
}

}  // namespace

nlohmann::ordered_json machine_facts() {
  char host[64] = "unknown";
  gethostname(host, sizeof host - 1);
  return {
      {"commit", GROUP_MUON_COMMIT},
      {"host", host},
      {"processor", processor()},
      {"cores", std::thread::hardware_concurrency()},
      {"threads", at::get_num_threads()},
      {"torch", TORCH_VERSION},
      {"cpu_capability", at::get_cpu_capability()},
  };
}

double gemm_peak(torch::ScalarType precision, const torch::Device& device) {
  using Clock = std::chrono::steady_clock;
  constexpr int64_t kSize = 1024;
  const auto options = at::TensorOptions(device).dtype(precision);
  const torch::Tensor a = at::ones({kSize, kSize}, options), b = at::ones({kSize, kSize}, options);
  const auto once = [&] {
    const auto start = Clock::now();
    at::matmul(a, b).select(0, 0).select(0, 0).item<float>();  // waits for the result
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  once();
  double best = once();
  for (const auto start = Clock::now(); Clock::now() - start < std::chrono::milliseconds(250);) {
    best = std::min(best, once());
  }
  return 2.0 * kSize * kSize * kSize / best;
}

}  // namespace train
