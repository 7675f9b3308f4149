#pragma once
// The Gram form of the Newton–Schulz iteration on the CPU's own matrix products, block by block: X in
// bf16, the small matrices (all symmetric, all in cache) in bf16 or, for Method::kAccurateGram, in fp32.

#include <c10/util/BFloat16.h>

#include <cstdint>
#include <vector>

#include "group_muon/orthogonalize.h"

namespace group_muon {

/// A contiguous block of any orientation. `scale` makes its Frobenius norm 1: it is multiplied in on
/// the way, so that no pass over the block is needed for it.
struct GramBlock {
  const c10::BFloat16* in = nullptr;
  c10::BFloat16* out = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  float scale = 1;
};

/// Whether such options take the path below, on the CPU.
bool can_use_cpu_gram(const OrthogonalizeOptions& options);

/// Norms within which a block may come as it is: its squares are far from the ends of fp32.
constexpr double kSmallestNorm = 1e-12;
constexpr double kLargestNorm = 1e12;

/// The blocks are of one oriented shape. Where options.restarts are empty each gets its own. Threads take whole ones; what does not come out even is
/// shared within its products.
void cpu_gram(const std::vector<GramBlock>& blocks, const OrthogonalizeOptions& options);

}  // namespace group_muon
