#pragma once
// SIMD engines: the Gram form of the Newton–Schulz iteration, block by block, on our own matrix products. X has type
// T, bf16 or float. The small matrices (all symmetric, all in cache) have type T or, for Method::kAccurateGram, fp32.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "group_muon/iteration.h"

namespace group_muon {

/// A block of any orientation. It stays in cache while it is loaded, orthogonalized and stored.
template <typename T>
struct SimdBlock {
  int64_t rows = 0;
  int64_t cols = 0;
  /// Writes the block to this memory, row by row. Returns the factor that makes its Frobenius norm 1. The
  /// iteration multiplies by it, so no extra pass over the block is needed.
  std::function<float(T*)> load;
  std::function<void(const T*)> store;
};

/// Norms for which a block needs no scaling: its squares are far from the limits of fp32.
constexpr double kSmallestNorm = 1e-12;
constexpr double kLargestNorm = 1e12;

/// Steps after which to restart. Nearly square blocks restart after every step: products with X then cost no more than
/// those of the small matrices, and rounding is smallest. In other blocks, if one direction has much of the norm,
/// small directions are lost in the rounding of R and the error grows with each step. Such dominated blocks restart
/// more often.
struct Restarts {
  std::vector<int64_t> of_dominated;
  std::vector<int64_t> of_others;

  bool differ() const { return of_dominated != of_others; }
};

/// Those of blocks of this shape.
Restarts restarts_for(int64_t short_side, int64_t long_side, const OrthogonalizeOptions& options);

/// Orthogonalizes blocks of one shape, in any orientation. The options must be resolved() to a SIMD engine. If
/// options.restarts is empty, restarts are chosen for each block. Each thread loads, orthogonalizes and stores whole
/// blocks; for the blocks left over, the threads share each product.
template <typename T>
void orthogonalize_simd(
    const std::vector<SimdBlock<T>>& blocks, const OrthogonalizeOptions& options);

/// The same for a tensor. x: [count, rows, cols] in fp32 or fp64, on the CPU.
at::Tensor orthogonalize_simd(const at::Tensor& x, const OrthogonalizeOptions& options);

}  // namespace group_muon
