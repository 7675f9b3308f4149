#include "group_muon/products_kernel.h"

#include <algorithm>
#include <cstring>

#include "group_muon/simd.h"

namespace group_muon::GROUP_MUON_TARGET {
namespace {

// A tile of `out` is kTileRows × kPanel. Its sums fill most of the registers; a few hold one row of B's panel.
// Entries of A are broadcast from memory.
#if defined(GROUP_MUON_TARGET_16_REGISTERS)
constexpr int64_t kTileRows = 6, kVectors = 2;
#else
constexpr int64_t kTileRows = 8, kVectors = 3;
#endif
constexpr int64_t kPanel = kLanes * kVectors;

// A panel of this depth and the matching rows of A stay in the L1 and L2 caches. bf16 products are summed in one go.
constexpr int64_t kFloatDepth = 512;
[[maybe_unused]] constexpr int64_t kAnyDepth = int64_t{1} << 40;

template <typename In>
MatrixView<const In> rows_of(const MatrixView<const In>& m, Span rows) {
  return {m.data + rows.begin * m.stride, rows.size(), m.cols, m.stride};
}
template <typename In>
MatrixView<const In> cols_of(const MatrixView<const In>& m, Span cols) {
  return {m.data + cols.begin, m.rows, cols.size(), m.stride};
}

// Entries {M[k][j], M[k+1][j]} (for float M[k][j] alone) of the columns j ≥ `at`; zeros beyond the edges.
Vec entries_of_columns(const MatrixView<const float>& m, int64_t k, int64_t at) {
  return load(m.data + k * m.stride + at, m.cols - at);
}
// Entries of one row, starting at element k.
Vec entries_of_row(const MatrixView<const float>& m, int64_t row, int64_t k) {
  return load(m.data + row * m.stride + k, m.cols - k);
}
template <typename In>
Vec multiply_add(const Vec& a, const Vec& b, const Vec& sum) {
  return at::vec::fmadd(a, b, sum);
}

#ifdef GROUP_MUON_TARGET_BF16

Vec entries_of_columns(const MatrixView<const BFloat16>& m, int64_t k, int64_t at) {
  const __mmask16 lanes = first_lanes(m.cols - at);
  const auto* even = m.data + k * m.stride + at;
  const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, even));
  if (k + 1 >= m.rows) return Vec(_mm512_castsi512_ps(low));
  const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, even + m.stride));
  return Vec(_mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32(high, 16))));
}
Vec entries_of_row(const MatrixView<const BFloat16>& m, int64_t row, int64_t k) {
  const int64_t left = m.cols - k;
  const auto lanes = static_cast<__mmask32>(left >= 32 ? 0xffffffffU : (1U << left) - 1);
  return Vec(_mm512_castsi512_ps(_mm512_maskz_loadu_epi16(lanes, m.data + row * m.stride + k)));
}
template <>
[[maybe_unused]] Vec multiply_add<BFloat16>(const Vec& a, const Vec& b, const Vec& sum) {
  return Vec(_mm512_dpbf16_ps(
      static_cast<__m512>(sum), (__m512bh) static_cast<__m512>(a),
      (__m512bh) static_cast<__m512>(b)));
}

#endif

// Number of vectors of a panel that contain columns of `out`.
int64_t vectors_in(int64_t cols, int64_t panel) {
  return std::min(kVectors, (cols - panel * kPanel + kLanes - 1) / kLanes);
}

// Fetches a stretch of a later row: rows are packed faster than the CPU's own prefetchers follow from row to row.
template <typename In>
void fetch_ahead(const MatrixView<const In>& m, int64_t row, int64_t column, int64_t count) {
  constexpr int64_t kAhead = 6, kLine = 64 / static_cast<int64_t>(sizeof(In));
  if (row + kAhead >= m.rows) return;
  const In* from = m.data + (row + kAhead) * m.stride + column;
  for (int64_t i = 0; i < count; i += kLine) __builtin_prefetch(from + i);
}

// Panels that are packed together, to read whole stretches of a row.
constexpr int64_t kPanelsTogether = 12;

template <typename In>
void pack_panels(const MatrixView<const In>& b, Span panels, int64_t size, float* packed) {
  for (int64_t k = 0; k < b.rows; k += kInEntry<In>, packed += kPanel) {
    for (int64_t i = 0; i < kInEntry<In>; ++i) {
      fetch_ahead(b, k + i, panels.begin * kPanel, panels.size() * kPanel);
    }
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
      float* to = packed + (panel - panels.begin) * size;
      const int64_t column = panel * kPanel, left = b.cols - column;
      for (int64_t v = 0; v < kVectors && kLanes * v < left; ++v) {
        entries_of_columns(b, k, column + kLanes * v).store(to + kLanes * v);
      }
    }
  }
}

// The same from Bᵀ.
template <typename In>
void pack_panel_transposed(
    const MatrixView<const In>& bt, int64_t column, int64_t vectors, float* packed) {
  const int64_t depth = entries<In>(bt.cols);
  for (int64_t v = 0; v < vectors; ++v) {
    for (int64_t k = 0; k < depth; k += kLanes) {
      Vec rows[kLanes];
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; ++i) {
        const int64_t row = column + kLanes * v + i;
        rows[i] = row < bt.rows ? entries_of_row(bt, row, k * kInEntry<In>) : Vec(0.0F);
      }
      transpose(rows);
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; ++i) {
        if (k + i < depth) rows[i].store(packed + (k + i) * kPanel + kLanes * v);
      }
    }
  }
}

template <typename In, typename Out>
void pack_right(const Product<In, Out>& product, Span k, Span panels, float* packed) {
  const int64_t size = entries<In>(k.size()) * kPanel;
  if (product.transpose_b) {
    const auto b = cols_of(product.b, k);
    for (int64_t panel = panels.begin; panel < panels.end; ++panel, packed += size) {
      pack_panel_transposed(b, panel * kPanel, vectors_in(product.out.cols, panel), packed);
    }
    return;
  }
  const auto b = rows_of(product.b, k);
  for (int64_t first = panels.begin; first < panels.end; first += kPanelsTogether) {
    const Span some{first, std::min(first + kPanelsTogether, panels.end)};
    pack_panels(b, some, size, packed + (first - panels.begin) * size);
  }
}

// Packs tiles of A, which is not transposed.
template <typename In>
void pack_tiles(const MatrixView<const In>& a, Span tiles, float* packed) {
  const int64_t depth = entries<In>(a.cols);
  const int64_t size = tile_size(depth, kTileRows);
  for (int64_t tile = tiles.begin; tile < tiles.end; ++tile, packed += size) {
    for (int64_t j = 0; j < kTileRows; j += kLanes) {
      const int64_t lanes = std::min(kLanes, kTileRows - j);
      for (int64_t k = 0; k < depth; k += kLanes) {
        Vec rows[kLanes];
#pragma GCC unroll 16
        for (int64_t i = 0; i < kLanes; ++i) {
          const int64_t row = tile * kTileRows + j + i;
          const bool there = i < lanes && row < a.rows;
          rows[i] = there ? entries_of_row(a, row, k * kInEntry<In>) : Vec(0.0F);
        }
        transpose(rows);
        // A full vector writes past its entry; the next entry overwrites the excess. The last entry has no successor.
        for (int64_t i = 0; i < kLanes && k + i + 1 < depth; ++i) {
          rows[i].store(packed + (k + i) * kTileRows + j);
        }
        if (depth - k <= kLanes) {
          store(packed + (depth - 1) * kTileRows + j, lanes, rows[depth - 1 - k]);
        }
      }
    }
  }
}

// Packs tiles of Aᵀ, several at a time, to use whole cache lines of a row.
void pack_tiles_transposed(const MatrixView<const float>& at, Span tiles, float* packed) {
  constexpr int64_t kTogether = 128;
  constexpr bool kOneStore = kTileRows < kLanes && 2 * kTileRows > kLanes;
  const int64_t size = tile_size(at.rows, kTileRows);
  for (int64_t first = tiles.begin; first < tiles.end; first += kTogether) {
    const int64_t last = std::min(first + kTogether, tiles.end);
    float* to = packed + (first - tiles.begin) * size;
    for (int64_t k = 0; k < at.rows; ++k, to += kTileRows) {
      const float* row = at.data + k * at.stride;
      fetch_ahead(at, k, first * kTileRows, (last - first) * kTileRows);
      for (int64_t tile = first; tile < last; ++tile) {
        float* entries = to + (tile - first) * size;
        const int64_t begin = tile * kTileRows, left = at.cols - begin;
        if (kOneStore && left >= kLanes && k + 1 < at.rows) {
          Vec::loadu(row + begin).store(entries);  // the next entry overwrites the excess
        } else if (left >= kTileRows) {
          std::memcpy(entries, row + begin, kTileRows * sizeof(float));
        } else {
          for (int64_t i = 0; i < kTileRows; ++i) entries[i] = i < left ? row[begin + i] : 0;
        }
      }
    }
  }
}

#ifdef GROUP_MUON_TARGET_BF16

// A vector holds the entries of two tiles.
void pack_tiles_transposed(const MatrixView<const BFloat16>& at, Span tiles, float* packed) {
  static_assert(kLanes == 2 * kTileRows);
  const int64_t size = tile_size(entries<BFloat16>(at.rows), kTileRows);
  for (int64_t tile = tiles.begin; tile < tiles.end; tile += 2) {
    const bool both = tile + 1 < tiles.end;
    float* to = packed + (tile - tiles.begin) * size;
    for (int64_t k = 0; k < at.rows; k += kInEntry<BFloat16>, to += kTileRows) {
      float lanes[kLanes];
      entries_of_columns(at, k, tile * kTileRows).store(lanes);
      std::copy_n(lanes, kTileRows, to);
      if (both) std::copy_n(lanes + kTileRows, kTileRows, to + size);
    }
  }
}

#endif

template <typename In, typename Out>
void pack_left(const Product<In, Out>& product, Span k, Span tiles, float* packed) {
  if (product.transpose_a) {
    pack_tiles_transposed(rows_of(product.a, k), tiles, packed);
  } else {
    pack_tiles(cols_of(product.a, k), tiles, packed);
  }
}

// The rows of A in a tile: entry k of row i is at `data` + i·row_step + k·step.
template <typename In>
struct TileOfA {
  const In* data = nullptr;
  int64_t row_step = 0;
  int64_t step = 0;
  int64_t whole = 0;  // number of complete entries
  bool half = false;  // whether half an entry follows
};

// Computes `Rows` rows starting at `row`, for the first `Vectors` vectors of the panel at `column`.
template <int64_t Rows, int64_t Vectors, typename In, typename Out>
void compute_tile(
    const Product<In, Out>& product, const TileOfA<In>& a, bool first, int64_t row, int64_t column,
    const float* panel) {
  Vec sums[Rows][Vectors];
  for (auto& sum : sums) {
    for (auto& part : sum) part = Vec(0.0F);
  }
  const auto add = [&](int64_t k, int64_t bytes) {
    Vec parts[Vectors];
    for (int64_t v = 0; v < Vectors; ++v) parts[v] = Vec::loadu(panel + k * kPanel + kLanes * v);
    for (int64_t i = 0; i < Rows; ++i) {
      const Vec left = broadcast(a.data + i * a.row_step + k * a.step, bytes);
      for (int64_t v = 0; v < Vectors; ++v) {
        sums[i][v] = multiply_add<In>(left, parts[v], sums[i][v]);
      }
    }
  };
#pragma GCC unroll 4
  for (int64_t k = 0; k < a.whole; ++k) add(k, sizeof(float));
  if (a.half) add(a.whole, sizeof(In));
  // Later stretches of k are added to `out`.
  const Out* d = first ? product.d : product.out.data;
  const Vec alpha(product.alpha), beta(first ? product.beta : 1);
  const int64_t cols = product.out.cols - column;
  const bool whole = cols >= kLanes * Vectors;
#pragma GCC unroll 8
  for (int64_t i = 0; i < Rows; ++i) {
#pragma GCC unroll 8
    for (int64_t v = 0; v < Vectors; ++v) {
      const int64_t count = whole ? kLanes : cols - kLanes * v;
      const int64_t offset = (row + i) * product.out.stride + column + kLanes * v;
      Vec value = sums[i][v] * alpha;
      if (d != nullptr) value = at::vec::fmadd(load(d + offset, count), beta, value);
      store(product.out.data + offset, count, value);
    }
  }
}

template <int64_t Rows, typename In, typename Out>
void compute_tile(
    const Product<In, Out>& product, const TileOfA<In>& a, bool first, int64_t row, int64_t panel,
    const float* packed) {
  const int64_t vectors = vectors_in(product.out.cols, panel), column = panel * kPanel;
  if (vectors == 1) {
    compute_tile<Rows, 1>(product, a, first, row, column, packed);
  } else if (vectors == 2) {
    compute_tile<Rows, 2>(product, a, first, row, column, packed);
  } else {
    compute_tile<Rows, kVectors>(product, a, first, row, column, packed);
  }
}

template <typename In, typename Out>
void compute(
    const Product<In, Out>& product, Span k, Span rows, Span panels, const float* left,
    const float* right, bool upper) {
  const int64_t depth = entries<In>(k.size());
  TileOfA<In> a;
  if (left != nullptr) {
    a.row_step = kInEntry<In>;
    a.step = kInEntry<In> * kTileRows;
  } else if (product.transpose_a) {  // float only: an entry is one number
    a.row_step = 1;
    a.step = product.a.stride;
  } else {
    a.row_step = product.a.stride;
    a.step = kInEntry<In>;
  }
  a.half = left == nullptr && k.size() % kInEntry<In> != 0;
  a.whole = a.half ? depth - 1 : depth;
  for (int64_t row = rows.begin; row < rows.end;) {
    const int64_t there = rows.end - row, in_tile = (row - rows.begin) % kTileRows;
    const int64_t count = there >= kTileRows && in_tile == 0 ? kTileRows
                          : there >= 4                       ? 4
                          : there >= 2                       ? 2
                                                             : 1;
    if (left != nullptr) {
      const int64_t tile = (row - rows.begin) / kTileRows;
      const float* entries_of_tile = left + tile * tile_size(depth, kTileRows);
      a.data = reinterpret_cast<const In*>(entries_of_tile + in_tile);
    } else {
      a.data = product.a.data + row * a.row_step + k.begin * (a.step / kInEntry<In>);
    }
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
      if (upper && row >= (panel + 1) * kPanel) continue;
      const float* packed = right + (panel - panels.begin) * depth * kPanel;
      const bool first = k.begin == 0;
      if (count == kTileRows) {
        compute_tile<kTileRows>(product, a, first, row, panel, packed);
      } else if (count == 4) {
        compute_tile<4>(product, a, first, row, panel, packed);
      } else if (count == 2) {
        compute_tile<2>(product, a, first, row, panel, packed);
      } else {
        compute_tile<1>(product, a, first, row, panel, packed);
      }
    }
    row += count;
  }
}

void mirror(const MatrixView<float>& out, int64_t panel) {
  const int64_t begin = panel * kPanel, end = std::min(begin + kPanel, out.cols);
  for (int64_t at = begin; at < end; at += kLanes) {
    const int64_t cols = std::min(kLanes, end - at);
    for (int64_t row = 0; row < at; row += kLanes) {  // kLanes divides `at`: no partial tiles
      Vec tile[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) {
        tile[i] = load(out.data + (row + i) * out.stride + at, cols);
      }
      transpose(tile);
      for (int64_t i = 0; i < cols; ++i) tile[i].store(out.data + (at + i) * out.stride + row);
    }
    for (int64_t j = at; j < at + cols; ++j) {
      for (int64_t i = at; i < j; ++i) {
        out.data[j * out.stride + i] = out.data[i * out.stride + j];
      }
    }
  }
}

#ifdef GROUP_MUON_TARGET_BF16

void mirror(const MatrixView<BFloat16>& out, int64_t panel) {
  const int64_t column = panel * kPanel, last = std::min(column + kPanel, out.cols);
  int64_t row = 0;
  for (; row + 8 <= column; row += 8) {  // 8 × 8 at a time
    for (int64_t at = column; at + 8 <= last; at += 8) {
      __m128i r[8], t[8];
      for (int64_t i = 0; i < 8; ++i) {
        r[i] = _mm_loadu_si128(
            reinterpret_cast<const __m128i*>(out.data + (row + i) * out.stride + at));
      }
      for (int64_t i = 0; i < 4; ++i) {
        t[2 * i] = _mm_unpacklo_epi16(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm_unpackhi_epi16(r[2 * i], r[2 * i + 1]);
      }
      for (int64_t i = 0; i < 2; ++i) {
        r[4 * i] = _mm_unpacklo_epi32(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm_unpackhi_epi32(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm_unpacklo_epi32(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm_unpackhi_epi32(t[4 * i + 1], t[4 * i + 3]);
      }
      for (int64_t i = 0; i < 4; ++i) {
        const auto put = [&](int64_t j, __m128i value) {
          _mm_storeu_si128(
              reinterpret_cast<__m128i*>(out.data + (at + j) * out.stride + row), value);
        };
        put(2 * i, _mm_unpacklo_epi64(r[i], r[i + 4]));
        put(2 * i + 1, _mm_unpackhi_epi64(r[i], r[i + 4]));
      }
    }
  }
  // The rest one by one: the diagonal block, and edges that are not a multiple of eight.
  const int64_t whole_rows = row, whole_end = column + (last - column) / 8 * 8;
  for (int64_t at = column; at < last; ++at) {
    for (int64_t i = at < whole_end ? whole_rows : 0; i < at; ++i) {
      out.data[at * out.stride + i] = out.data[i * out.stride + at];
    }
  }
}

#endif

template <typename In, typename Out>
constexpr ProductKernels<In, Out> table(int64_t depth) noexcept {
  return {
      kTileRows,
      kPanel,
      depth,
      pack_right<In, Out>,
      pack_left<In, Out>,
      compute<In, Out>,
      [](const MatrixView<Out>& out, int64_t panel) { mirror(out, panel); }};
}

}  // namespace

constinit const ProductKernels<float, float> kFloatProducts = table<float, float>(kFloatDepth);

#ifdef GROUP_MUON_TARGET_BF16
constinit const ProductKernels<BFloat16, BFloat16> kBf16Products =
    table<BFloat16, BFloat16>(kAnyDepth);
constinit const ProductKernels<BFloat16, float> kBf16ToFloatProducts =
    table<BFloat16, float>(kAnyDepth);
#endif

}  // namespace group_muon::GROUP_MUON_TARGET
