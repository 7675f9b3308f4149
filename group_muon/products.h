#pragma once
// Our own matrix products, summed in fp32 in an order that does not depend on the number of threads. Symmetric
// results cost little more than half: only the part on and above the diagonal is computed.

#include <c10/util/BFloat16.h>

#include <cstdint>
#include <vector>

#include "group_muon/engine.h"

namespace group_muon {

/// A matrix whose rows are `stride` elements apart.
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

/// out = alpha·A·B + beta·D, where A and B may be given as their transposes. D has the same memory layout as `out`;
/// it may be `out` itself or null. In and Out are bf16 or float (but not float → bf16).
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

/// Computes the product in this thread. Needs a SIMD engine that runs here and, for bf16, one that computes in it.
template <typename In, typename Out>
void multiply(Engine engine, const Product<In, Out>& product);

/// The same for a result known to be symmetric: XXᵀ, or a product of commuting symmetric matrices.
template <typename In, typename Out>
void multiply_symmetric(Engine engine, const Product<In, Out>& product);

/// The same, in parallel on all of torch's threads.
template <typename In, typename Out>
void multiply_shared(Engine engine, const Product<In, Out>& product);
template <typename In, typename Out>
void multiply_symmetric_shared(Engine engine, const Product<In, Out>& product);

/// The right-hand side of several products, packed once for all of them.
template <typename In>
struct PackedRight {
  int64_t depth = 0;
  int64_t cols = 0;
  std::vector<float> entries = {};
};

/// Packs B, or Bᵀ if `transpose`. Reuses the memory of `packed`.
template <typename In>
void pack(Engine engine, const MatrixView<const In>& b, bool transpose, PackedRight<In>& packed);

/// Computes a product in this thread with the packed B, or with its leading rows and columns, as many as A and `out`
/// have. A must not be transposed. In bf16 the number of leading rows must be even, unless all are used.
template <typename In, typename Out>
void multiply_packed(Engine engine, const Product<In, Out>& product, const PackedRight<In>& packed);

}  // namespace group_muon
