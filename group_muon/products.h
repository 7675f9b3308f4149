#pragma once
// Matrix products of our own, summed in fp32 in an order that does not depend on the number of threads. Symmetric
// results cost little more than half: only what lies on and above the diagonal is computed.

#include <c10/util/BFloat16.h>

#include <cstdint>
#include <vector>

#include "group_muon/engine.h"

namespace group_muon {

/// Rows lie `stride` elements apart.
template <typename T>
struct MatrixView {
  T* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;
};

template <typename T>
MatrixView<const T> readable(const MatrixView<T>& view) {
  return {view.data, view.rows, view.cols, view.stride};
}

/// out = alpha·A·B + beta·D, where A and B may be given by their transposes. D lies as `out` does and
/// may be `out`, or nothing. In and Out are bf16 or float (not float → bf16).
template <typename In, typename Out>
struct Product {
  MatrixView<const In> a = {};
  MatrixView<const In> b = {};
  MatrixView<Out> out = {};
  const Out* d = nullptr;
  float alpha = 1;
  float beta = 0;
  bool transpose_a = false;
  bool transpose_b = false;

  int64_t depth() const { return transpose_a ? a.rows : a.cols; }
};

/// In this thread. The engine is one that runs here, and not portable; bf16 needs one that computes in it.
template <typename In, typename Out>
void multiply(Engine engine, const Product<In, Out>& product);

/// The same for a result that is known to be symmetric: XXᵀ, or a product of commuting symmetric
/// matrices.
template <typename In, typename Out>
void multiply_symmetric(Engine engine, const Product<In, Out>& product);

/// The same with all of torch's threads.
template <typename In, typename Out>
void multiply_shared(Engine engine, const Product<In, Out>& product);
template <typename In, typename Out>
void multiply_symmetric_shared(Engine engine, const Product<In, Out>& product);

/// The right side of several products, rearranged once for all of them.
template <typename In>
struct PackedRight {
  int64_t depth = 0;
  int64_t cols = 0;
  std::vector<float> entries = {};
};

/// Packs B, or Bᵀ if `transpose`. Memory of an earlier use is used again.
template <typename In>
void pack(Engine engine, const MatrixView<const In>& b, bool transpose, PackedRight<In>& packed);

/// A product in this thread with B as it was packed, or with its first rows and columns: as many as A and `out` have.
/// A is not transposed. In bf16 the first rows are an even number, or all.
template <typename In, typename Out>
void multiply_packed(Engine engine, const Product<In, Out>& product, const PackedRight<In>& packed);

}  // namespace group_muon
