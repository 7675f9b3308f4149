#pragma once
// The Gram form of the Newton–Schulz iteration on the CPU's own matrix products, block by block: X in
// bf16, the small matrices (all symmetric, all in cache) in bf16 or, for Method::kAccurateGram, in fp32.

#include <c10/util/BFloat16.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "group_muon/orthogonalize.h"

namespace group_muon {

/// A block of any orientation. It is loaded, orthogonalized and stored while it is in cache.
struct GramBlock {
  int64_t rows = 0;
  int64_t cols = 0;
  /// Writes the block to this memory, row after row. Returns a factor that makes its Frobenius norm 1: it
  /// is multiplied in on the way, so that no pass over the block is needed for it.
  std::function<float(c10::BFloat16*)> load;
  std::function<void(const c10::BFloat16*)> store;
};

/// Whether such options take the path below, on the CPU.
bool can_use_cpu_gram(const OrthogonalizeOptions& options);

/// Norms within which a block may come as it is: its squares are far from the ends of fp32.
constexpr double kSmallestNorm = 1e-12;
constexpr double kLargestNorm = 1e12;

/// The blocks are of one shape, in any orientation. Where options.restarts are empty each gets its own. Threads
/// take whole blocks, and load and store them; what does not come out even is shared within its products.
void cpu_gram(const std::vector<GramBlock>& blocks, const OrthogonalizeOptions& options);

}  // namespace group_muon
