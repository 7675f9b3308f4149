#pragma once
// What an engine knows about products: how a part of one is computed in one thread. products.cpp cuts the parts and
// shares them out.

#include "group_muon/products.h"
#include "group_muon/targets.h"

namespace group_muon {

struct Span {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
};

/// Columns of `out` are computed by panels, rows by tiles. Packed matrices consist of entries of 32 bits: a float,
/// or two bf16 that follow each other along k.
template <typename In, typename Out>
struct ProductKernels {
  int64_t tile_rows = 0;
  int64_t panel = 0;  // columns
  /// The longest stretch of k that is summed at once; longer products are added up in parts.
  int64_t depth = 0;

  /// Packs one panel of B: `panel` entries for each entry along k.
  void (*pack_right)(const Product<In, Out>&, Span k, int64_t panel, float* packed) = nullptr;
  /// Packs tiles of A, one after the other: `tile_rows` entries for each along k.
  void (*pack_left)(const Product<In, Out>&, Span k, Span tiles, float* packed) = nullptr;
  /// Computes these rows of these panels, from the first of which `right` is packed. `left` is packed from the first
  /// of the rows on, or null: A is read where it is. `upper` leaves out tiles below the diagonal.
  void (*compute)(
      const Product<In, Out>&, Span k, Span rows, Span panels, const float* left,
      const float* right, bool upper) = nullptr;
  /// Copies what lies above the diagonal in this panel to below it.
  void (*mirror)(const MatrixView<Out>&, int64_t panel) = nullptr;
};

/// Entries along k.
template <typename In>
constexpr int64_t entries(int64_t depth) {
  constexpr auto kInEntry = static_cast<int64_t>(sizeof(float) / sizeof(In));
  return (depth + kInEntry - 1) / kInEntry;
}

GROUP_MUON_FOR_TARGETS(GROUP_MUON_DECLARE_TABLE, kFloatProducts, ProductKernels<float, float>)
GROUP_MUON_FOR_BF16_TARGETS(
    GROUP_MUON_DECLARE_TABLE, kBf16Products, ProductKernels<c10::BFloat16, c10::BFloat16>)
GROUP_MUON_FOR_BF16_TARGETS(
    GROUP_MUON_DECLARE_TABLE, kBf16ToFloatProducts, ProductKernels<c10::BFloat16, float>)

}  // namespace group_muon
