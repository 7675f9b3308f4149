#pragma once
// What each SIMD engine implements for products: computing one part in one thread. products.cpp splits a product into
// parts and distributes them over threads.

#include "group_muon/products.h"
#include "group_muon/targets.h"

namespace group_muon {

struct Span {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
};

/// Columns of `out` are computed in panels, rows in tiles. Packed matrices consist of 32-bit entries: one float, or
/// two bf16 that are adjacent along k.
template <typename In, typename Out>
struct ProductKernels {
  int64_t tile_rows = 0;
  int64_t panel = 0;  // columns per panel
  /// Longest stretch of k summed at once. Longer products are summed in parts.
  int64_t depth = 0;

  /// Packs consecutive panels of B: `panel` entries per entry along k.
  void (*pack_right)(const Product<In, Out>&, Span k, Span panels, float* packed) = nullptr;
  /// Packs consecutive tiles of A: `tile_rows` entries per entry along k, tile_size() apart.
  void (*pack_left)(const Product<In, Out>&, Span k, Span tiles, float* packed) = nullptr;
  /// Computes these rows of these panels. `right` is packed starting at the first of the panels. `left` is packed
  /// starting at the first of the rows; if it is null, A is read in place, which a transposed A allows only in float.
  /// `upper` skips tiles below the diagonal.
  void (*compute)(
      const Product<In, Out>&, Span k, Span rows, Span panels, const float* left,
      const float* right, bool upper) = nullptr;
  /// Copies this panel's part above the diagonal to below the diagonal.
  void (*mirror)(const MatrixView<Out>&, int64_t panel) = nullptr;
};

/// Numbers in an entry of 4 bytes.
template <typename In>
constexpr int64_t kInEntry = 4 / static_cast<int64_t>(sizeof(In));

/// Number of entries along k.
template <typename In>
constexpr int64_t entries(int64_t depth) {
  return (depth + kInEntry<In> - 1) / kInEntry<In>;
}

/// Distance between packed tiles of A. A cache line lies between them, so that tiles that are written together do not
/// evict each other from the cache.
constexpr int64_t tile_size(int64_t entries_along_k, int64_t tile_rows) {
  constexpr int64_t kCacheLine = 16;
  return entries_along_k * tile_rows + kCacheLine;
}

GROUP_MUON_FOR_TARGETS(GROUP_MUON_DECLARE_TABLE, kFloatProducts, ProductKernels<float, float>)
GROUP_MUON_FOR_BF16_TARGETS(
    GROUP_MUON_DECLARE_TABLE, kBf16Products, ProductKernels<c10::BFloat16, c10::BFloat16>)
GROUP_MUON_FOR_BF16_TARGETS(
    GROUP_MUON_DECLARE_TABLE, kBf16ToFloatProducts, ProductKernels<c10::BFloat16, float>)

}  // namespace group_muon
