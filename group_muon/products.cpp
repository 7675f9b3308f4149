#include "group_muon/products.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "group_muon/parallel.h"
#include "group_muon/products_kernel.h"

namespace group_muon {
namespace {

using c10::BFloat16;

// Number of entries in a group of packed panels, which stays in cache while rows of A stream past.
constexpr int64_t kGroupEntries = 1 << 16;
// Tiles of A and panels of B that a thread packs at a time.
constexpr int64_t kTilesTogether = 32;
constexpr int64_t kPanelsTogether = 12;
// Number of entries in a thread's strip of packed A.
constexpr int64_t kStripEntries = 1 << 17;

template <typename In, typename Out>
const ProductKernels<In, Out>& kernels_of(Engine engine);
GROUP_MUON_DEFINE_LOOKUP(
    GROUP_MUON_FOR_TARGETS, kernels_of, kFloatProducts, ProductKernels<float, float>)
GROUP_MUON_DEFINE_LOOKUP(
    GROUP_MUON_FOR_BF16_TARGETS, kernels_of, kBf16Products, ProductKernels<BFloat16, BFloat16>)
GROUP_MUON_DEFINE_LOOKUP(
    GROUP_MUON_FOR_BF16_TARGETS, kernels_of, kBf16ToFloatProducts, ProductKernels<BFloat16, float>)

// Per-thread workspace, kept between products.
float* room_in(std::vector<float>& memory, int64_t size) {
  if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
  return memory.data();
}
float* right_memory(int64_t size) {
  static thread_local std::vector<float> memory;
  return room_in(memory, size);
}
float* left_memory(int64_t size) {
  static thread_local std::vector<float> memory;
  return room_in(memory, size);
}

// Runs work(i) for all i < count, in this thread or in parallel.
const auto run_here = [](int64_t count, auto&& work) {
  for (int64_t i = 0; i < count; ++i) work(i);
};
const auto run_shared = [](int64_t count, auto&& work) {
  share_out(count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) work(i);
  });
};

int64_t parts(int64_t whole, int64_t size) { return (whole + size - 1) / size; }

// The i-th stretch of `size` in [0, whole).
Span stretch(int64_t i, int64_t size, int64_t whole) {
  return {i * size, std::min((i + 1) * size, whole)};
}

template <typename In, typename Out>
struct Work {
  const ProductKernels<In, Out>& kernels;
  const Product<In, Out>& product;
  bool symmetric;

  int64_t rows() const { return product.out.rows; }
  int64_t panels() const { return parts(product.out.cols, kernels.panel); }
  int64_t tiles() const { return parts(rows(), kernels.tile_rows); }
  // Stretches of k. There is at least one, possibly empty, because `out` must be written.
  int64_t stretches() const { return std::max<int64_t>(1, parts(product.depth(), kernels.depth)); }
  Span k(int64_t i) const { return stretch(i, kernels.depth, product.depth()); }
  int64_t longest() const { return entries<In>(std::min(kernels.depth, product.depth())); }

  // Number of panels of B packed together. In bf16 it is one if a panel fits in the L1 cache.
  int64_t group() const {
    constexpr int64_t kFirstCache = 1 << 13;
    if (std::is_same_v<In, BFloat16> && longest() * kernels.panel <= kFirstCache) return 1;
    return std::clamp<int64_t>(
        kGroupEntries / std::max<int64_t>(1, longest() * kernels.panel), 1, panels());
  }

  // Computes these rows of these panels for one stretch of k. `left` is packed starting at the first row, or null.
  void compute(int64_t i, Span rows, Span panels, const float* left) const {
    const int64_t size = entries<In>(k(i).size()) * kernels.panel;
    float* right = right_memory(panels.size() * size);
    kernels.pack_right(product, k(i), panels, right);
    kernels.compute(product, k(i), rows, panels, left, right, symmetric);
  }

  // Runs after all tiles: they also write below the diagonal, and only one thread may write there at a time.
  template <typename Run>
  void mirror(Run&& run) const {
    if (!symmetric) return;
    run(panels(), [&](int64_t panel) { kernels.mirror(product.out, panel); });
  }

  // The i-th of `count` groups. Late groups of a symmetric product take longer than early ones, so each thread gets
  // groups from both ends.
  int64_t in_turn(int64_t i, int64_t count) const {
    if (!symmetric) return i;
    return i % 2 == 0 ? i / 2 : count - 1 - i / 2;
  }

  // Whether A is read in place. The columns of a short transposed A are few cache lines, so packing does not pay.
  bool reads_in_place() const {
    constexpr int64_t kShort = 64;
    return !product.transpose_a || (std::is_same_v<In, float> && product.depth() <= kShort);
  }

  // Splits the work by panels. A is read in place or packed as a whole.
  template <typename Run>
  void by_panels(Run&& run, int64_t threads) const {
    // Enough groups of panels for all threads. If there are few panels, rows are split as well, into pieces large
    // enough to be worth packing the panels for.
    const int64_t even = panels() / ((product.transpose_a && !symmetric ? 2 : 8) * threads);
    const int64_t size = threads == 1 ? group() : std::clamp<int64_t>(even, 1, group());
    const int64_t groups = parts(panels(), size);
    const int64_t wanted = threads == 1 || symmetric ? 1 : parts(4 * threads, groups);
    const int64_t cuts = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, rows() / 128));
    const int64_t piece = parts(parts(rows(), cuts), kernels.tile_rows) * kernels.tile_rows;
    const int64_t pieces = parts(rows(), piece);
    const auto span = [&](int64_t i) { return stretch(in_turn(i, groups), size, panels()); };
    if (reads_in_place()) {
      run(groups * pieces, [&](int64_t i) {
        for (int64_t j = 0; j < stretches(); ++j) {
          compute(j, stretch(i % pieces, piece, rows()), span(i / pieces), nullptr);
        }
      });
      return mirror(run);
    }
    float* left = left_memory(tiles() * tile_size(longest(), kernels.tile_rows));
    for (int64_t j = 0; j < stretches(); ++j) {
      const int64_t tile = tile_size(entries<In>(k(j).size()), kernels.tile_rows);
      run(parts(tiles(), kTilesTogether), [&](int64_t i) {
        const Span some = stretch(i, kTilesTogether, tiles());
        kernels.pack_left(product, k(j), some, left + some.begin * tile);
      });
      run(groups * pieces, [&](int64_t i) {
        const Span rows_here = stretch(i % pieces, piece, rows());
        compute(j, rows_here, span(i / pieces), left + rows_here.begin / kernels.tile_rows * tile);
      });
    }
    mirror(run);
  }

  // Whether to pack A: its rows would leave the cache between groups of panels, and there are enough panels to make
  // it worthwhile. Rows a multiple of 4 KB apart evict each other from the cache sooner.
  bool is_large() const {
    constexpr int64_t kLargest = 1 << 19, kManyPanels = 24, kCrowded = 1024, kSomePanels = 8;
    if (!std::is_same_v<In, float> || rows() * longest() <= kLargest) return false;
    return panels() >= (product.a.stride % kCrowded == 0 ? kSomePanels : kManyPanels);
  }

  // Splits the work by strips of A, which each thread packs into its own cache. B is packed once.
  template <typename Run>
  void by_strips(Run&& run, int64_t threads) const {
    for (int64_t j = 0; j < stretches(); ++j) {
      const int64_t depth = entries<In>(k(j).size());
      const int64_t size = depth * kernels.panel, tile = tile_size(depth, kernels.tile_rows);
      float* right = right_memory(panels() * size);
      const int64_t shares = parts(panels(), threads * kPanelsTogether) * threads;
      const int64_t share = parts(panels(), shares);
      run(parts(panels(), share), [&](int64_t i) {
        const Span some = stretch(i, share, panels());
        kernels.pack_right(product, k(j), some, right + some.begin * size);
      });
      // The same number of strips for each thread.
      const int64_t largest = std::max<int64_t>(1, kStripEntries / std::max<int64_t>(1, tile));
      const int64_t strips = parts(parts(tiles(), largest), threads) * threads;
      const int64_t strip = parts(tiles(), strips);
      const int64_t group_size = group();
      run(parts(tiles(), strip), [&](int64_t i) {
        const Span span = stretch(i, strip, tiles());
        float* left = left_memory(strip * tile);
        kernels.pack_left(product, k(j), span, left);
        const Span rows_here = {
            span.begin * kernels.tile_rows, std::min(span.end * kernels.tile_rows, rows())};
        for (int64_t g = 0; g < parts(panels(), group_size); ++g) {
          const Span some = stretch(g, group_size, panels());
          kernels.compute(
              product, k(j), rows_here, some, left, right + some.begin * size, symmetric);
        }
      });
    }
  }
};

template <typename In, typename Out>
void run(Engine engine, const Product<In, Out>& product, bool symmetric, bool shared) {
  if (product.out.rows == 0 || product.out.cols == 0) return;
  const Work<In, Out> work{kernels_of<In, Out>(engine), product, symmetric};
  const int64_t threads = shared ? at::get_num_threads() : 1;
  const bool tall = product.out.rows >= product.out.cols;
  const bool strips = !symmetric && (work.is_large() || (shared && product.transpose_a && tall));
  const auto go = [&](auto&& run) {
    strips ? work.by_strips(run, threads) : work.by_panels(run, threads);
  };
  shared ? go(run_shared) : go(run_here);
}

}  // namespace

template <typename In, typename Out>
void multiply(Engine engine, const Product<In, Out>& product) {
  run(engine, product, /*symmetric=*/false, /*shared=*/false);
}

template <typename In, typename Out>
void multiply_symmetric(Engine engine, const Product<In, Out>& product) {
  run(engine, product, /*symmetric=*/true, /*shared=*/false);
}

template <typename In, typename Out>
void multiply_shared(Engine engine, const Product<In, Out>& product) {
  run(engine, product, /*symmetric=*/false, /*shared=*/true);
}

template <typename In, typename Out>
void multiply_symmetric_shared(Engine engine, const Product<In, Out>& product) {
  run(engine, product, /*symmetric=*/true, /*shared=*/true);
}

template <typename In>
void pack(Engine engine, const MatrixView<const In>& b, bool transpose, PackedRight<In>& packed) {
  const auto& kernels = kernels_of<In, float>(engine);
  packed.depth = transpose ? b.cols : b.rows;
  packed.cols = transpose ? b.rows : b.cols;
  const Product<In, float> product{.b = b, .out = {.cols = packed.cols}, .transpose_b = transpose};
  const int64_t panels = parts(packed.cols, kernels.panel);
  float* to = room_in(packed.entries, panels * kernels.panel * entries<In>(packed.depth));
  for (int64_t begin = 0; begin < packed.depth; begin += kernels.depth) {
    const Span k{begin, std::min(begin + kernels.depth, packed.depth)};
    kernels.pack_right(product, k, {0, panels}, to);
    to += panels * entries<In>(k.size()) * kernels.panel;
  }
}

template <typename In, typename Out>
void multiply_packed(
    Engine engine, const Product<In, Out>& product, const PackedRight<In>& packed) {
  const auto& kernels = kernels_of<In, Out>(engine);
  const int64_t depth = product.depth(), cols = product.out.cols;
  TORCH_CHECK_VALUE(
      !product.transpose_a && depth <= packed.depth && cols <= packed.cols,
      "group_muon: a product of ", depth, " × ", cols, " does not fit what was packed, ",
      packed.depth, " × ", packed.cols);
  TORCH_CHECK_VALUE(
      (std::is_same_v<In, float>) || depth % 2 == 0 || depth == packed.depth,
      "group_muon: a part of what was packed in bf16 should have an even number of rows, not ",
      depth);
  const int64_t panels = parts(cols, kernels.panel);
  const int64_t packed_panels = parts(packed.cols, kernels.panel);
  const float* right = packed.entries.data();
  // There is always one stretch of k, possibly empty, because `out` has to be written.
  const int64_t stretches = std::max<int64_t>(1, parts(depth, kernels.depth));
  for (int64_t i = 0; i < stretches; ++i) {
    const Span k = stretch(i, kernels.depth, depth);
    // A packed panel may be deeper than this product.
    const int64_t size =
        entries<In>(stretch(i, kernels.depth, packed.depth).size()) * kernels.panel;
    const int64_t group = entries<In>(k.size()) * kernels.panel == size ? panels : 1;
    for (int64_t panel = 0; panel < panels; panel += group) {
      kernels.compute(
          product, k, {0, product.out.rows}, {panel, panel + group}, nullptr, right + panel * size,
          /*upper=*/false);
    }
    right += packed_panels * size;
  }
}

template void pack(Engine, const MatrixView<const BFloat16>&, bool, PackedRight<BFloat16>&);
template void pack(Engine, const MatrixView<const float>&, bool, PackedRight<float>&);

#define GROUP_MUON_INSTANTIATE(In, Out)                                     \
  template void multiply(Engine, const Product<In, Out>&);                  \
  template void multiply_symmetric(Engine, const Product<In, Out>&);        \
  template void multiply_shared(Engine, const Product<In, Out>&);           \
  template void multiply_symmetric_shared(Engine, const Product<In, Out>&); \
  template void multiply_packed(Engine, const Product<In, Out>&, const PackedRight<In>&);
GROUP_MUON_INSTANTIATE(BFloat16, BFloat16)
GROUP_MUON_INSTANTIATE(BFloat16, float)
GROUP_MUON_INSTANTIATE(float, float)

}  // namespace group_muon
