#pragma once
// torch's threads behind a plain function. Files that are compiled for one kind of CPU use it: at::parallel_for would
// leave functions in them that the linker could take for everybody's.

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace group_muon {

/// Calls work(begin, end) for parts of [0, count) in all threads; a part has at least `grain`.
void share_out(
    int64_t count, int64_t grain, c10::function_ref<void(int64_t begin, int64_t end)> work);

}  // namespace group_muon
