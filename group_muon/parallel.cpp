#include "group_muon/parallel.h"

#include <ATen/Parallel.h>

#ifdef __SANITIZE_THREAD__
#include <algorithm>
#include <exception>
#include <thread>
#include <vector>
#endif

namespace group_muon {

#ifdef __SANITIZE_THREAD__

// ThreadSanitizer does not know that OpenMP's threads wait for each other. It knows this of the standard library's.
namespace {
thread_local bool inside = false;
}

int64_t threads_here() { return inside ? 1 : at::get_num_threads(); }

void share_out(
    int64_t count, int64_t grain, c10::function_ref<void(int64_t begin, int64_t end)> work) {
  const int64_t parts = std::min(threads_here(), (count + grain - 1) / std::max<int64_t>(1, grain));
  if (parts <= 1) {
    if (count > 0) work(0, count);
    return;
  }
  const int64_t size = (count + parts - 1) / parts;
  std::vector<std::exception_ptr> errors(static_cast<size_t>(parts));
  std::vector<std::thread> threads;
  for (int64_t begin = 0; begin < count; begin += size) {
    threads.emplace_back([&, begin] {
      inside = true;
      try {
        work(begin, std::min(count, begin + size));
      } catch (...) {
        errors[static_cast<size_t>(begin / size)] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

#else

int64_t threads_here() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

void share_out(
    int64_t count, int64_t grain, c10::function_ref<void(int64_t begin, int64_t end)> work) {
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) { work(begin, end); });
}

#endif

}  // namespace group_muon
