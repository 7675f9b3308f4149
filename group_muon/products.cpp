#include "group_muon/products.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "group_muon/avx512.h"

namespace group_muon {

bool has_products() {
  static const bool has = has_avx512_bf16();
  return has;
}

#ifdef GROUP_MUON_AVX512
GROUP_MUON_AVX512_BEGIN

namespace {

using c10::BFloat16;

// A tile of `out` is kTileRows × kPanel: 24 vectors of sums in registers, three of B, and A's entries
// broadcast from memory. An entry is what one lane multiplies: two bf16 along k, or one float.
constexpr int64_t kTileRows = 8;
constexpr int64_t kVectors = 3;
constexpr int64_t kPanel = 16 * kVectors;

using Entry = uint32_t;
template <typename In>
constexpr int64_t kDepth = sizeof(Entry) / sizeof(In);  // along k
template <typename In>
int64_t entries(int64_t depth) {
  return (depth + kDepth<In> - 1) / kDepth<In>;
}

using Vector = __m512i;

// Transposes 16 × 16 numbers of 32 bits.
void transpose(Vector (&rows)[16]) {
  Vector t[16];
  for (int64_t i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int64_t i = 0; i < 16; i += 4) {
    rows[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int64_t i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
  }
  for (int64_t i = 0; i < 4; ++i) {
    rows[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    rows[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    rows[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// Entries {M[k][j], M[k+1][j]} (or M[k][j] alone) of 16 columns from `at` on; zeros beyond the edges.
Vector entries_of_columns(const MatrixView<const BFloat16>& m, int64_t k, int64_t at) {
  const __mmask16 lanes = first_lanes(m.cols - at);
  const bool pair = k + 1 < m.rows;
  const auto* even = m.data + k * m.stride + at;
  const Vector low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, even));
  if (!pair) return low;
  const Vector high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, even + m.stride));
  return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}
Vector entries_of_columns(const MatrixView<const float>& m, int64_t k, int64_t at) {
  return _mm512_maskz_loadu_epi32(first_lanes(m.cols - at), m.data + k * m.stride + at);
}

// 16 entries of one row from element k on.
Vector entries_of_row(const MatrixView<const BFloat16>& m, int64_t row, int64_t k) {
  const int64_t left = m.cols - k;
  const auto lanes = static_cast<__mmask32>(left >= 32 ? 0xffffffffU : (1U << left) - 1);
  return _mm512_maskz_loadu_epi16(lanes, m.data + row * m.stride + k);
}
Vector entries_of_row(const MatrixView<const float>& m, int64_t row, int64_t k) {
  return _mm512_maskz_loadu_epi32(first_lanes(m.cols - k), m.data + row * m.stride + k);
}

// A packed panel of B has kPanel entries for every entry along k; only the first `vectors` are filled.
template <typename In>
void pack_panel(const MatrixView<const In>& b, int64_t column, int64_t vectors, Entry* panel) {
  for (int64_t k = 0; k < b.rows; k += kDepth<In>, panel += kPanel) {
    for (int64_t v = 0; v < vectors; ++v) {
      _mm512_storeu_si512(panel + 16 * v, entries_of_columns(b, k, column + 16 * v));
    }
  }
}

// The same from Bᵀ.
template <typename In>
void pack_panel_transposed(
    const MatrixView<const In>& bt, int64_t column, int64_t vectors, Entry* panel) {
  const int64_t depth = entries<In>(bt.cols);
  for (int64_t v = 0; v < vectors; ++v) {
    for (int64_t k = 0; k < depth; k += 16) {
      Vector rows[16];
      for (int64_t i = 0; i < 16; ++i) {
        const int64_t row = column + 16 * v + i;
        rows[i] = row < bt.rows ? entries_of_row(bt, row, k * kDepth<In>) : _mm512_setzero_si512();
      }
      transpose(rows);
      const int64_t count = std::min<int64_t>(16, depth - k);
      for (int64_t i = 0; i < count; ++i) {
        _mm512_storeu_si512(panel + (k + i) * kPanel + 16 * v, rows[i]);
      }
    }
  }
}

// A as tiles read it: entry k of row i is at `data` + i·row_step + k·step. A row-major A is read in
// place; one that is given transposed is packed, kTileRows entries for every k.
template <typename In>
struct Left {
  const In* data = nullptr;
  int64_t rows = 0;
  int64_t depth = 0;      // along k, in elements
  int64_t row_step = 0;   // within a tile, in elements
  int64_t step = 0;       // from entry to entry
  int64_t tile_step = 0;  // from tile to tile
  int64_t first_row = 0;  // that is at `data`
  bool packed = false;    // entries are whole; in place, the last may stop in the middle
};

template <typename In>
Left<In> left_in_place(const MatrixView<const In>& a) {
  return {
      .data = a.data,
      .rows = a.rows,
      .depth = a.cols,
      .row_step = a.stride,
      .step = kDepth<In>,
      .tile_step = kTileRows * a.stride};
}

template <typename In>
int64_t packed_tile(int64_t depth) {  // in entries
  return entries<In>(depth) * kTileRows;
}

// Tiles of Aᵀ, two at a time: `first` and `last` count pairs of tiles.
template <typename In>
void pack_left(const MatrixView<const In>& at, int64_t first, int64_t last, Entry* packed) {
  const int64_t tile = packed_tile<In>(at.rows);
  for (int64_t pair = first; pair < last; ++pair) {
    Entry* even = packed + 2 * (pair - first) * tile;
    for (int64_t k = 0; k < at.rows; k += kDepth<In>, even += kTileRows) {
      const Vector both = entries_of_columns(at, k, 2 * pair * kTileRows);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(even), _mm512_castsi512_si256(both));
      _mm256_storeu_si256(
          reinterpret_cast<__m256i*>(even + tile), _mm512_extracti64x4_epi64(both, 1));
    }
  }
}

template <typename In>
Left<In> left_packed(const MatrixView<const In>& at, const Entry* packed) {
  return {
      .data = reinterpret_cast<const In*>(packed),
      .rows = at.cols,
      .depth = at.rows,
      .row_step = kDepth<In>,
      .step = kTileRows * kDepth<In>,
      .tile_step = packed_tile<In>(at.rows) * kDepth<In>,
      .packed = true};
}

int64_t tile_pairs(int64_t rows) { return (rows + 2 * kTileRows - 1) / (2 * kTileRows); }

template <typename In>
__m512 multiply_add(__m512 sum, Entry a, Vector b) {
  if constexpr (std::is_same_v<In, float>) {
    return _mm512_fmadd_ps(
        _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(a))), _mm512_castsi512_ps(b), sum);
  } else {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(static_cast<int>(a)), (__m512bh)b);
  }
}

// `count` elements from `from` on as an entry; an entry's missing half is zero.
template <typename In>
Entry entry_at(const In* from, int64_t count = kDepth<In>) {
  Entry entry = 0;
  std::memcpy(&entry, from, count * sizeof(In));
  return entry;
}

// Rows `row` … `row + Rows` - 1 of a panel of `out`, its first 16·Vectors columns.
template <int64_t Rows, int64_t Vectors, typename In, typename Out>
void compute_tile(
    const Product<In, Out>& product, const Left<In>& a, int64_t row, int64_t column,
    const Entry* panel) {
  const int64_t in_a = row - a.first_row;
  const In* rows = a.data + in_a / kTileRows * a.tile_step + in_a % kTileRows * a.row_step;
  __m512 sums[Rows][Vectors];
  for (auto& sum : sums) {
    for (auto& part : sum) part = _mm512_setzero_ps();
  }
  const auto add = [&](const Entry* b, auto&& entry) {
    Vector parts[Vectors];
    for (int64_t v = 0; v < Vectors; ++v) parts[v] = _mm512_loadu_si512(b + 16 * v);
    for (int64_t i = 0; i < Rows; ++i) {
      const Entry left = entry(i);
      for (int64_t v = 0; v < Vectors; ++v)
        sums[i][v] = multiply_add<In>(sums[i][v], left, parts[v]);
    }
  };
  const int64_t whole = a.packed ? entries<In>(a.depth) : a.depth / kDepth<In>;
  for (int64_t k = 0; k < whole; ++k) {
    add(panel + k * kPanel,
        [&](int64_t i) { return entry_at(rows + i * a.row_step + k * a.step); });
  }
  if (whole < entries<In>(a.depth)) {
    add(panel + whole * kPanel,
        [&](int64_t i) { return entry_at(rows + i * a.row_step + whole * a.step, 1); });
  }
  const __m512 alpha = _mm512_set1_ps(product.alpha), beta = _mm512_set1_ps(product.beta);
  for (int64_t i = 0; i < Rows; ++i) {
    for (int64_t v = 0; v < Vectors; ++v) {
      const int64_t at = column + 16 * v;
      const __mmask16 lanes = first_lanes(product.out.cols - at);
      const int64_t offset = (row + i) * product.out.stride + at;
      __m512 value = _mm512_mul_ps(sums[i][v], alpha);
      if (product.d != nullptr)
        value = _mm512_fmadd_ps(load(lanes, product.d + offset), beta, value);
      store(lanes, product.out.data + offset, value);
    }
  }
}

template <int64_t Vectors, typename In, typename Out>
void compute_rows(
    const Product<In, Out>& product, const Left<In>& a, int64_t row, int64_t last, int64_t column,
    const Entry* panel) {
  for (; row + kTileRows <= last; row += kTileRows) {
    compute_tile<kTileRows, Vectors>(product, a, row, column, panel);
  }
  for (; row < last; ++row) compute_tile<1, Vectors>(product, a, row, column, panel);
}

// The entries above the diagonal in columns `column` … go to below it.
void mirror_panel(const MatrixView<BFloat16>& out, int64_t column) {
  const int64_t last = std::min(column + kPanel, out.cols);
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
  // The rest one by one: the diagonal block, and edges that are no multiple of eight.
  const int64_t whole_rows = row, whole_end = column + (last - column) / 8 * 8;
  for (int64_t at = column; at < last; ++at) {
    for (int64_t i = at < whole_end ? whole_rows : 0; i < at; ++i) {
      out.data[at * out.stride + i] = out.data[i * out.stride + at];
    }
  }
}

void mirror_panel(const MatrixView<float>& out, int64_t column) {
  const int64_t last = std::min(column + kPanel, out.cols);
  for (int64_t at = column; at < last; at += 16) {
    for (int64_t row = 0; row < at; row += 16) {  // `at` is a multiple of 16, so no row is cut
      Vector tile[16];
      for (int64_t i = 0; i < 16; ++i) {
        tile[i] = _mm512_maskz_loadu_epi32(
            first_lanes(last - at), out.data + (row + i) * out.stride + at);
      }
      transpose(tile);
      for (int64_t i = 0; i < std::min<int64_t>(16, last - at); ++i) {
        _mm512_storeu_si512(out.data + (at + i) * out.stride + row, tile[i]);
      }
    }
    for (int64_t j = at; j < std::min(at + 16, last); ++j) {
      for (int64_t i = at; i < j; ++i) {
        out.data[j * out.stride + i] = out.data[i * out.stride + j];
      }
    }
  }
}

// Scratch memory of this thread, kept from product to product.
Entry* panel_memory(int64_t size) {
  static thread_local std::vector<Entry> memory;
  if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
  return memory.data();
}
Entry* left_memory(int64_t size) {
  static thread_local std::vector<Entry> memory;
  if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
  return memory.data();
}

int64_t num_panels(int64_t cols) { return (cols + kPanel - 1) / kPanel; }

template <typename In, typename Out>
int64_t vectors_in(const Product<In, Out>& product, int64_t panel) {
  return std::min(kVectors, (product.out.cols - panel * kPanel + 15) / 16);
}

template <typename In, typename Out>
void pack_right(const Product<In, Out>& product, int64_t panel, Entry* packed) {
  const int64_t vectors = vectors_in(product, panel);
  if (product.transpose_b) {
    pack_panel_transposed(product.b, panel * kPanel, vectors, packed);
  } else {
    pack_panel(product.b, panel * kPanel, vectors, packed);
  }
}

// Rows `row` … `last` - 1 of one panel, whose B is packed.
template <typename In, typename Out>
void compute_packed(
    const Product<In, Out>& product, const Left<In>& a, int64_t row, int64_t last, int64_t panel,
    const Entry* packed) {
  const int64_t vectors = vectors_in(product, panel), column = panel * kPanel;
  if (vectors == 3) return compute_rows<3>(product, a, row, last, column, packed);
  if (vectors == 2) return compute_rows<2>(product, a, row, last, column, packed);
  return compute_rows<1>(product, a, row, last, column, packed);
}

template <typename In, typename Out>
void compute_panel(
    const Product<In, Out>& product, const Left<In>& a, int64_t row, int64_t last, int64_t panel) {
  Entry* packed = panel_memory(entries<In>(a.depth) * kPanel);
  pack_right(product, panel, packed);
  compute_packed(product, a, row, last, panel, packed);
}

template <typename In, typename Out>
void compute_symmetric_panel(const Product<In, Out>& product, const Left<In>& a, int64_t panel) {
  compute_panel(product, a, 0, std::min((panel + 1) * kPanel, product.out.rows), panel);
  mirror_panel(product.out, panel * kPanel);
}

// A for tiles; `pack(pairs, work)` runs work(first, last) over all pairs of tiles.
template <typename In, typename Out, typename Pack>
Left<In> prepare_left(const Product<In, Out>& product, Pack&& pack) {
  const auto& a = product.a;
  if (!product.transpose_a) return left_in_place(a);
  const int64_t pairs = tile_pairs(a.cols);
  Entry* packed = left_memory(2 * pairs * packed_tile<In>(a.rows));
  pack(pairs, [&](int64_t first, int64_t last) {
    pack_left(a, first, last, packed + 2 * first * packed_tile<In>(a.rows));
  });
  return left_packed(a, packed);
}

const auto run_here = [](int64_t count, auto&& work) { work(0, count); };
const auto run_shared = [](int64_t count, auto&& work) { at::parallel_for(0, count, 1, work); };

template <typename In, typename Out>
bool is_empty(const Product<In, Out>& product) {
  return product.out.rows == 0 || product.out.cols == 0;
}

// A is given transposed: each thread packs strips of it that stay in its cache, B is packed once.
template <typename In, typename Out>
void multiply_strips(const Product<In, Out>& product) {
  constexpr int64_t kStripEntries = 1 << 17;
  const int64_t rows = product.out.rows, panels = num_panels(product.out.cols);
  const int64_t depth = entries<In>(product.a.rows), panel_size = depth * kPanel;
  Entry* right = panel_memory(panels * panel_size);
  at::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) pack_right(product, i, right + i * panel_size);
  });
  // In pairs of tiles, as A is packed; small enough that every thread gets some.
  const int64_t pairs = tile_pairs(rows), tile = packed_tile<In>(product.a.rows);
  const int64_t strip = std::clamp<int64_t>(
      std::min(kStripEntries / (2 * tile + 1), pairs / (4 * int64_t{at::get_num_threads()})), 1,
      pairs);
  at::parallel_for(0, (pairs + strip - 1) / strip, 1, [&](int64_t begin, int64_t end) {
    Entry* left = left_memory(2 * strip * tile);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i * strip, last = std::min(first + strip, pairs);
      pack_left(product.a, first, last, left);
      Left<In> a = left_packed(product.a, left);
      a.first_row = 2 * kTileRows * first;
      for (int64_t panel = 0; panel < panels; ++panel) {
        compute_packed(
            product, a, a.first_row, std::min(2 * kTileRows * last, rows), panel,
            right + panel * panel_size);
      }
    }
  });
}

}  // namespace

template <typename In, typename Out>
void multiply(const Product<In, Out>& product) {
  const Left<In> a = prepare_left(product, run_here);
  for (int64_t panel = 0; panel < num_panels(product.out.cols); ++panel) {
    compute_panel(product, a, 0, product.out.rows, panel);
  }
}

template <typename In, typename Out>
void multiply_symmetric(const Product<In, Out>& product) {
  const Left<In> a = prepare_left(product, run_here);
  for (int64_t panel = 0; panel < num_panels(product.out.cols); ++panel) {
    compute_symmetric_panel(product, a, panel);
  }
}

template <typename In, typename Out>
void multiply_shared(const Product<In, Out>& product) {
  if (is_empty(product)) return;
  if (product.transpose_a) return multiply_strips(product);
  const Left<In> a = left_in_place(product.a);
  const int64_t panels = num_panels(product.out.cols), rows = product.out.rows;
  // Rows are cut, too, where there are few panels; a piece is large enough to be worth its packing.
  const int64_t wanted = (4 * int64_t{at::get_num_threads()} + panels - 1) / panels;
  const int64_t cuts = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, rows / 128));
  const int64_t piece = (rows / cuts + 2 * kTileRows - 1) / (2 * kTileRows) * (2 * kTileRows);
  const int64_t pieces = (rows + piece - 1) / piece;
  at::parallel_for(0, panels * pieces, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i % pieces * piece;
      compute_panel(product, a, row, std::min(row + piece, rows), i / pieces);
    }
  });
}

template <typename In, typename Out>
void multiply_symmetric_shared(const Product<In, Out>& product) {
  const Left<In> a = prepare_left(product, run_shared);
  // Late panels are longer than early ones, so each thread gets some of both ends.
  const int64_t panels = num_panels(product.out.cols);
  at::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      compute_symmetric_panel(product, a, i % 2 == 0 ? i / 2 : panels - 1 - i / 2);
    }
  });
}

GROUP_MUON_AVX512_END
#else

template <typename In, typename Out>
void multiply(const Product<In, Out>&) {
  TORCH_CHECK(false, "group_muon: this CPU has no products of its own");
}
template <typename In, typename Out>
void multiply_symmetric(const Product<In, Out>& product) {
  multiply(product);
}
template <typename In, typename Out>
void multiply_shared(const Product<In, Out>& product) {
  multiply(product);
}
template <typename In, typename Out>
void multiply_symmetric_shared(const Product<In, Out>& product) {
  multiply(product);
}

#endif

#define GROUP_MUON_INSTANTIATE(In, Out)                      \
  template void multiply(const Product<In, Out>&);           \
  template void multiply_symmetric(const Product<In, Out>&); \
  template void multiply_shared(const Product<In, Out>&);    \
  template void multiply_symmetric_shared(const Product<In, Out>&);
GROUP_MUON_INSTANTIATE(c10::BFloat16, c10::BFloat16)
GROUP_MUON_INSTANTIATE(c10::BFloat16, float)
GROUP_MUON_INSTANTIATE(float, float)

}  // namespace group_muon
