#include "study/workers.h"

#include <c10/util/Exception.h>
#include <torch/cuda.h>

#include <algorithm>
#include <cmath>
#include <thread>

#include "study/cost.h"
#include "train/memory.h"
#include "train/run.h"

namespace study {
namespace {

int64_t cores() { return std::max(1U, std::thread::hardware_concurrency()); }

}  // namespace

Workers choose_workers(const Folder& folder, Workers workers) {
  if (workers.device.empty()) {
    workers.device = train::configure(folder.study.options).device;
  }
  const bool cuda = workers.device == "cuda";
  const auto gpus =
      static_cast<int64_t>(torch::cuda::device_count());  // NOLINT(bugprone-signed-char-misuse)
  TORCH_CHECK_VALUE(!cuda || gpus > 0, "--device cuda: this machine has no GPU that torch can use");
  if (workers.jobs == 0) {
    const auto first = train::resolved(config_of(folder, folder.plan.front()));
    double largest = 1;
    for (const auto& run : folder.plan) {
      largest = std::max(largest, memory_of(train::filled_in(config_of(folder, run), first)));
    }
    const double fitting =
        0.8 * static_cast<double>(train::available_memory().value_or(0)) / largest;
    const auto most = static_cast<double>(cores());
    workers.jobs = cuda ? gpus : static_cast<int64_t>(std::clamp(std::floor(fitting), 1.0, most));
  }
  if (workers.threads == 0) workers.threads = std::max<int64_t>(1, cores() / workers.jobs);
  return workers;
}

std::vector<std::string> gpus_of_jobs(const std::string& visible, int64_t gpus, int64_t jobs) {
  std::vector<std::string> names;
  for (size_t at = 0; !visible.empty() && at <= visible.size();) {
    const size_t end = std::min(visible.find(',', at), visible.size());
    names.push_back(visible.substr(at, end - at));
    at = end + 1;
  }
  if (names.empty()) {
    for (int64_t gpu = 0; gpu < gpus; ++gpu) names.push_back(std::to_string(gpu));
  }
  std::vector<std::string> of_jobs;
  for (int64_t job = 0; job < jobs; ++job) {
    of_jobs.push_back(names[static_cast<size_t>(job) % names.size()]);
  }
  return of_jobs;
}

}  // namespace study
