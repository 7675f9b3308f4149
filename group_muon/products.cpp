#include "group_muon/products.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "group_muon/products_kernel.h"

namespace group_muon {
namespace {

using c10::BFloat16;

// Packed panels of so many entries are kept in the cache while rows of A go by.
constexpr int64_t kGroupEntries = 1 << 16;
// Tiles of A that one thread packs in one go.
constexpr int64_t kTilesTogether = 16;
// A thread's strip of a packed A.
constexpr int64_t kStripEntries = 1 << 17;

template <typename In, typename Out>
const ProductKernels<In, Out>& kernels_of(Engine engine);
GROUP_MUON_DEFINE_LOOKUP(
    GROUP_MUON_FOR_TARGETS, kernels_of, kFloatProducts, ProductKernels<float, float>)
GROUP_MUON_DEFINE_LOOKUP(
    GROUP_MUON_FOR_BF16_TARGETS, kernels_of, kBf16Products, ProductKernels<BFloat16, BFloat16>)
GROUP_MUON_DEFINE_LOOKUP(
    GROUP_MUON_FOR_BF16_TARGETS, kernels_of, kBf16ToFloatProducts, ProductKernels<BFloat16, float>)

// Scratch memory of this thread, kept from product to product.
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

// Runs work(i) for all i < count: here, or in all threads.
const auto run_here = [](int64_t count, auto&& work) {
  for (int64_t i = 0; i < count; ++i) work(i);
};
const auto run_shared = [](int64_t count, auto&& work) {
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
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
  // Of k. There is always one, if an empty one, since `out` is to be written.
  int64_t stretches() const { return std::max<int64_t>(1, parts(product.depth(), kernels.depth)); }
  Span k(int64_t i) const { return stretch(i, kernels.depth, product.depth()); }
  int64_t longest() const { return entries<In>(std::min(kernels.depth, product.depth())); }

  // Panels of B that are packed together. One alone, where it fits into the first cache.
  int64_t group() const {
    constexpr int64_t kFirstCache = 1 << 13;
    if (std::is_same_v<In, BFloat16> && longest() * kernels.panel <= kFirstCache) return 1;
    return std::clamp<int64_t>(
        kGroupEntries / std::max<int64_t>(1, longest() * kernels.panel), 1, panels());
  }

  // These rows of these panels for one stretch of k. `left` is packed from the first row on, or null.
  void compute(int64_t i, Span rows, Span panels, const float* left) const {
    const int64_t size = entries<In>(k(i).size()) * kernels.panel;
    float* right = right_memory(panels.size() * size);
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
      kernels.pack_right(product, k(i), panel, right + (panel - panels.begin) * size);
    }
    kernels.compute(product, k(i), rows, panels, left, right, symmetric);
  }

  // Tiles reach below the diagonal, where only one may write: after all of them.
  template <typename Run>
  void mirror(Run&& run) const {
    if (!symmetric) return;
    run(panels(), [&](int64_t panel) { kernels.mirror(product.out, panel); });
  }

  // The i-th of `count` groups. Late ones of a symmetric product are longer than early ones, so each thread gets
  // some of both ends.
  int64_t in_turn(int64_t i, int64_t count) const {
    if (!symmetric) return i;
    return i % 2 == 0 ? i / 2 : count - 1 - i / 2;
  }

  // By panels: all rows of A, which is read where it is or was packed as a whole.
  template <typename Run>
  void by_panels(Run&& run, int64_t threads) const {
    // So many groups of panels that every thread gets some; where there are few panels, rows are cut, too. A piece of
    // rows is large enough to be worth its packing.
    const int64_t even = panels() / (8 * threads);
    const int64_t size = threads == 1 ? group() : std::clamp<int64_t>(even, 1, group());
    const int64_t groups = parts(panels(), size);
    const int64_t wanted = threads == 1 || symmetric ? 1 : parts(4 * threads, groups);
    const int64_t cuts = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, rows() / 128));
    const int64_t piece = parts(parts(rows(), cuts), kernels.tile_rows) * kernels.tile_rows;
    const int64_t pieces = parts(rows(), piece);
    const auto span = [&](int64_t i) { return stretch(in_turn(i, groups), size, panels()); };
    if (!product.transpose_a) {
      run(groups * pieces, [&](int64_t i) {
        for (int64_t j = 0; j < stretches(); ++j) {
          compute(j, stretch(i % pieces, piece, rows()), span(i / pieces), nullptr);
        }
      });
      return mirror(run);
    }
    float* left = left_memory(longest() * tiles() * kernels.tile_rows);
    for (int64_t j = 0; j < stretches(); ++j) {
      const int64_t tile = entries<In>(k(j).size()) * kernels.tile_rows;
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

  // Whether A should be packed: its rows would leave the cache between one group of panels and the next, and there are
  // enough panels for that to pay. Rows that lie a multiple of 4 KB apart crowd each other out of the cache sooner.
  bool is_large() const {
    constexpr int64_t kLargest = 1 << 19, kManyPanels = 24, kCrowded = 1024, kSomePanels = 8;
    if (!std::is_same_v<In, float> || rows() * longest() <= kLargest) return false;
    return panels() >= (product.a.stride % kCrowded == 0 ? kSomePanels : kManyPanels);
  }

  // Each thread packs strips of A that stay in its cache, B is packed once.
  template <typename Run>
  void by_strips(Run&& run, int64_t threads) const {
    for (int64_t j = 0; j < stretches(); ++j) {
      const int64_t depth = entries<In>(k(j).size());
      const int64_t size = depth * kernels.panel, tile = depth * kernels.tile_rows;
      float* right = right_memory(panels() * size);
      run(panels(),
          [&](int64_t panel) { kernels.pack_right(product, k(j), panel, right + panel * size); });
      // As many strips for each thread.
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
  const bool strips = !symmetric && (work.is_large() || (shared && product.transpose_a));
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
    for (int64_t panel = 0; panel < panels; ++panel) {
      kernels.pack_right(product, k, panel, to);
      to += entries<In>(k.size()) * kernels.panel;
    }
  }
}

template <typename In, typename Out>
void multiply_packed(
    Engine engine, const Product<In, Out>& product, const PackedRight<In>& packed) {
  const auto& kernels = kernels_of<In, Out>(engine);
  const int64_t panels = parts(product.out.cols, kernels.panel);
  const int64_t packed_panels = parts(packed.cols, kernels.panel);
  const float* right = packed.entries.data();
  for (int64_t begin = 0; begin < product.depth(); begin += kernels.depth) {
    const Span k{begin, std::min(begin + kernels.depth, product.depth())};
    // A panel may be deeper than this product.
    const int64_t size = entries<In>(std::min(kernels.depth, packed.depth - begin)) * kernels.panel;
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
