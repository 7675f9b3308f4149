#pragma once
// Our own engines: the Gram form of the Newton–Schulz iteration on our own matrix products, block by block. X is in T,
// bf16 or float; the small matrices (all symmetric, all in cache) are in T too or, for Method::kAccurateGram, in fp32.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "group_muon/iteration.h"

namespace group_muon {

/// A block of any orientation. It is loaded, orthogonalized and stored while it is in cache.
template <typename T>
struct SimdBlock {
  int64_t rows = 0;
  int64_t cols = 0;
  /// Writes the block to this memory, row after row. Returns a factor that makes its Frobenius norm 1: it
  /// is multiplied in on the way, so that no pass over the block is needed for it.
  std::function<float(T*)> load;
  std::function<void(const T*)> store;
};

/// Norms within which a block may come as it is: its squares are far from the ends of fp32.
constexpr double kSmallestNorm = 1e-12;
constexpr double kLargestNorm = 1e12;

/// Orthogonalizes blocks of one shape, in any orientation. The options are resolved(), to an engine that is not
/// portable. Where options.restarts are empty each block gets its own. Threads take whole blocks, and load and store
/// them; what does not come out even is shared within its products.
template <typename T>
void orthogonalize_simd(
    const std::vector<SimdBlock<T>>& blocks, const OrthogonalizeOptions& options);

/// The same for a tensor. x: [count, rows, cols] in fp32 or fp64, on the CPU.
at::Tensor orthogonalize_simd(const at::Tensor& x, const OrthogonalizeOptions& options);

}  // namespace group_muon
