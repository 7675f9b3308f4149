#pragma once
// torch's threads behind a plain function, for files compiled for one kind of CPU: at::parallel_for would leave
// inline functions in them that the linker could use for all other files.

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace group_muon {

/// Calls work(begin, end) in parallel for parts of [0, count) with at least `grain` elements each. Within such a call
/// it does the work in one piece.
void share_out(
    int64_t count, int64_t grain, c10::function_ref<void(int64_t begin, int64_t end)> work);

/// How many threads share_out() would use here: one within its own calls.
int64_t threads_here();

}  // namespace group_muon
