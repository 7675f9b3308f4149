#include "train/machine.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/version.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "group_muon/products.h"
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

double gemm_peak(
    group_muon::Engine engine, torch::ScalarType precision, const torch::Device& device) {
  using Clock = std::chrono::steady_clock;
  constexpr int64_t kSize = 1024;
  const auto options = at::TensorOptions(device).dtype(precision);
  const torch::Tensor a = at::ones({kSize, kSize}, options), b = at::ones({kSize, kSize}, options);
  const auto fastest = [](auto&& multiply) {
    const auto once = [&] {
      const auto start = Clock::now();
      multiply();
      return std::chrono::duration<double>(Clock::now() - start).count();
    };
    double best = once();
    for (const auto start = Clock::now(); Clock::now() - start < std::chrono::milliseconds(125);) {
      best = std::min(best, once());
    }
    return best;
  };
  double best = fastest([&] {
    at::matmul(a, b).select(0, 0).select(0, 0).item<float>();  // waits for the result
  });
  if (engine != group_muon::Engine::kPortable && group_muon::computes_in(engine, precision)) {
    const torch::Tensor out = at::empty({kSize, kSize}, options);
    const auto ours = [&](auto type) {
      using T = decltype(type);
      const auto view = [](auto* data) {
        return group_muon::MatrixView<std::remove_pointer_t<decltype(data)>>{
            data, kSize, kSize, kSize};
      };
      group_muon::multiply_shared(
          engine, group_muon::Product<T, T>{
                      .a = view(a.const_data_ptr<T>()),
                      .b = view(b.const_data_ptr<T>()),
                      .out = view(out.data_ptr<T>())});
    };
    best = std::min(best, fastest([&] {
                      precision == torch::kBFloat16 ? ours(c10::BFloat16()) : ours(float());
                    }));
  }
  return 2.0 * kSize * kSize * kSize / best;
}

}  // namespace train
