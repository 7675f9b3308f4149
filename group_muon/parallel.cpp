#include "group_muon/parallel.h"

#include <ATen/Parallel.h>

namespace group_muon {

void share_out(
    int64_t count, int64_t grain, c10::function_ref<void(int64_t begin, int64_t end)> work) {
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) { work(begin, end); });
}

}  // namespace group_muon
