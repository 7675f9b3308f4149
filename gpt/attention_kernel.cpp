#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "gpt/kernels.h"
#include "gpt/vector_math.h"
#include "group_muon/parallel.h"
#include "group_muon/products.h"

namespace gpt::GROUP_MUON_TARGET {
namespace {

using group_muon::MatrixView;
using group_muon::PackedRight;
using group_muon::Product;
using group_muon::readable;

// Queries per tile. Small tiles waste less work above the diagonal; large tiles share more work across keys.
int64_t tile_rows(int64_t tokens) { return tokens <= 256 ? 32 : 64; }

template <typename T>
constexpr bool kHasProducts = !std::is_same_v<T, double>;

// Whether sums have the type of what is summed. Then weights replace scores in place.
template <typename T>
constexpr bool kInPlace = std::is_same_v<T, Sum<T>>;

// Runs in the calling thread. The fp64 version is a plain triple loop for tests and covers only the cases used here.
template <typename In, typename Out>
void product(const Product<In, Out>& p) {
  if constexpr (kHasProducts<In>) {
    group_muon::multiply(Engine::GROUP_MUON_ENGINE, p);
  } else {
    const auto entry = [](const auto& m, bool transpose, int64_t i, int64_t j) {
      return transpose ? m.data[j * m.stride + i] : m.data[i * m.stride + j];
    };
    const int64_t depth = p.transpose_a ? p.a.rows : p.a.cols;
    for (int64_t i = 0; i < p.out.rows; ++i) {
      for (int64_t j = 0; j < p.out.cols; ++j) {
        Out sum = 0;
        for (int64_t k = 0; k < depth; ++k) {
          sum += entry(p.a, p.transpose_a, i, k) * entry(p.b, p.transpose_b, k, j);
        }
        Out& out = p.out.data[i * p.out.stride + j];
        out = sum + (p.d == nullptr ? Out{0} : out);
      }
    }
  }
}

// out = A·B, or out += A·B if `add`.
template <typename In, typename Out>
void product(
    const MatrixView<const In>& a, bool transpose_a, const MatrixView<const In>& b,
    bool transpose_b, const MatrixView<Out>& out, bool add = false) {
  product(
      Product<In, Out>{
          .a = a,
          .b = b,
          .out = out,
          .d = add ? out.data : nullptr,
          .beta = 1,
          .transpose_a = transpose_a,
          .transpose_b = transpose_b});
}

// B or Bᵀ, packed once per head for the products of all its tiles. Each tile uses the rows that its queries see.
template <typename T>
struct Right {
  void set(const MatrixView<const T>& b, bool transposed) {
    view = b;
    transpose = transposed;
    if constexpr (kHasProducts<T>)
      group_muon::pack(Engine::GROUP_MUON_ENGINE, b, transpose, packed);
  }

  MatrixView<const T> view = {};
  bool transpose = false;
  PackedRight<T> packed = {};
};

// out = A·B or A·Bᵀ, with only the first `rows` rows of B.
template <typename In, typename Out>
void product(
    const MatrixView<const In>& a, const Right<In>& right, int64_t rows,
    const MatrixView<Out>& out) {
  const auto& view = right.view;
  const Product<In, Out> p{
      .a = a,
      .b = {view.data, rows, view.cols, view.stride},
      .out = out,
      .transpose_b = right.transpose};
  if constexpr (kHasProducts<In>) {
    group_muon::multiply_packed(Engine::GROUP_MUON_ENGINE, p, right.packed);
  } else {
    product(p);
  }
}

// Rotates a head's row by its position; `sign` -1 undoes it. Entry j is paired with entry j + half.
template <typename From, typename T, typename S>
void turn(const From* from, T* to, const S* cos, const S* sin, S sign, int64_t half) {
  // Heads are mostly multiples of 16. Blocks of a fixed size need no code for what is left over.
  constexpr int64_t kBlock = 8;
  const auto block = [&](int64_t begin, int64_t size) {
#pragma omp simd
    for (int64_t j = begin; j < begin + size; ++j) {
      const S first = static_cast<S>(from[j]), second = static_cast<S>(from[j + half]);
      to[j] = static_cast<T>(first * cos[j] + sign * second * sin[j]);
      to[j + half] = static_cast<T>(second * cos[j] - sign * first * sin[j]);
    }
  };
  int64_t j = 0;
  for (; j + kBlock <= half; j += kBlock) block(j, kBlock);
  block(j, half - j);
}

// One thread's workspace for the tiles of one head.
template <typename T>
struct Tiles {
  using S = Sum<T>;

  Tiles(int64_t rows, int64_t tokens, int64_t head_dim)
      : scores(rows * tokens),
        score_grads(rows * tokens),
        weights(kInPlace<T> ? 0 : rows * tokens),
        weight_grads(kInPlace<T> ? 0 : rows * tokens),
        sums(rows),
        output(rows * head_dim),
        query_grad(rows * head_dim),
        key_grad(tokens * head_dim),
        value_grad(tokens * head_dim) {}

  std::vector<S> scores, score_grads;    // [rows, tokens]
  std::vector<T> weights, weight_grads;  // what multiplies the values and the keys, if not in place
  std::vector<S> sums, output;           // of the softmax; [rows, head_dim]
  std::vector<S> query_grad, key_grad, value_grad;
  Right<T> keys, keys_transposed, values, values_transposed;

  T* weights_of_scores() { return in_place(scores, weights); }
  T* grads_of_scores() { return in_place(score_grads, weight_grads); }

 private:
  static T* in_place(std::vector<S>& sums, std::vector<T>& rounded) {
    if constexpr (kInPlace<T>) {
      return sums.data();
    } else {
      return rounded.data();
    }
  }
};

// A tile's queries, starting at `first`. keys() is the number of keys that the last of them sees.
struct TileSpan {
  int64_t first;
  int64_t rows;
  int64_t keys() const { return first + rows; }
};

template <typename Use>
void for_tiles(int64_t tokens, Use&& use) {
  const int64_t size = tile_rows(tokens);
  for (int64_t first = 0; first < tokens; first += size) {
    use(TileSpan{first, std::min(size, tokens - first)});
  }
}

// Runs work(batch, kv head, tiles) for every batch and kv head; each thread has its own tiles.
template <typename T, typename Work>
void for_kv_heads(const AttentionSizes& shape, Work&& work) {
  group_muon::share_out(shape.batch * shape.kv_heads, 1, [&](int64_t begin, int64_t end) {
    Tiles<T> tiles(tile_rows(shape.tokens), shape.tokens, shape.head_dim);
    for (int64_t i = begin; i < end; ++i) work(i / shape.kv_heads, i % shape.kv_heads, tiles);
  });
}

// A head's columns in a token-major matrix: [tokens, head_dim].
template <typename T>
MatrixView<T> head_view(
    const AttentionSizes& shape, T* matrix, int64_t stride, int64_t batch, int64_t head) {
  return {
      matrix + batch * shape.tokens * stride + head * shape.head_dim, shape.tokens, shape.head_dim,
      stride};
}

template <typename T>
MatrixView<T> rows_of(const MatrixView<T>& view, int64_t first, int64_t rows) {
  return {view.data + first * view.stride, rows, view.cols, view.stride};
}

// Fetches rows into the cache ahead of their use. They lie too far apart for the CPU to foresee them.
template <typename T>
void fetch(const MatrixView<T>& view) {
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
  for (int64_t i = 0; i < view.rows; ++i) {
    const T* row = view.data + i * view.stride;
    for (int64_t j = 0; j < view.cols; j += kLine) __builtin_prefetch(row + j);
  }
}

// Position of a kv head's keys and values within a row, counted in heads.
int64_t key_head(const AttentionSizes& shape, int64_t kv_head) { return shape.heads + kv_head; }
int64_t value_head(const AttentionSizes& shape, int64_t kv_head) {
  return shape.heads + shape.kv_heads + kv_head;
}

template <typename S>
S score_scale(const AttentionSizes& shape) {
  return 1 / std::sqrt(static_cast<S>(shape.head_dim));
}

// Hides the scores after the first `seen` by -∞. Returns where to stop: rows are processed in whole vectors, up to a
// multiple of 16 or the end of the row.
template <typename S>
int64_t hide_later(S* scores, int64_t seen, int64_t width) {
  const int64_t end = std::min((seen + 15) / 16 * 16, width);
  std::fill(scores + seen, scores + end, -std::numeric_limits<S>::infinity());
  return end;
}

// weights = exp(scale·(scores - largest)) of the first `seen` scores, then zeros up to `width`.
template <typename T>
struct SoftmaxRow {
  Sum<T> sum;      // the softmax is weights / sum
  Sum<T> log_sum;  // of exp(scale·scores)
};
template <typename T>
SoftmaxRow<T> softmax_row(Sum<T>* scores, T* weights, Sum<T> scale, int64_t seen, int64_t width) {
  using S = Sum<T>;
  const int64_t end = hide_later(scores, seen, width);
  S largest = scores[0];
#pragma omp simd reduction(max : largest)
  for (int64_t j = 0; j < end; ++j) largest = scores[j] > largest ? scores[j] : largest;
  S sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < end; ++j) {
    scores[j] = vector_exp((scores[j] - largest) * scale);
    sum += scores[j];
  }
  if constexpr (!kInPlace<T>) {
    for (int64_t j = 0; j < end; ++j) weights[j] = static_cast<T>(scores[j]);
  }
  std::fill(weights + end, weights + width, static_cast<T>(0));
  return {sum, largest * scale + std::log(sum)};
}

// weights = the recomputed softmax; weight_grads = the gradient with respect to QKᵀ.
template <typename T>
void softmax_row_backward(
    Sum<T>* scores, const Sum<T>* grads, T* weights, T* weight_grads, Sum<T> scale, Sum<T> log_sum,
    Sum<T> dot, int64_t seen, int64_t width) {
  using S = Sum<T>;
  const int64_t end = hide_later(scores, seen, width);
#pragma omp simd
  for (int64_t j = 0; j < end; ++j) {
    const S weight = vector_exp(scores[j] * scale - log_sum);
    weights[j] = static_cast<T>(weight);
    weight_grads[j] = static_cast<T>(weight * (grads[j] - dot) * scale);
  }
  std::fill(weights + end, weights + width, static_cast<T>(0));
  std::fill(weight_grads + end, weight_grads + width, static_cast<T>(0));
}

// The inverse RMS of a head's queries or keys, one per token. Heads are counted within a row.
template <typename S>
S* inverses_of(const AttentionSizes& shape, S* inverses, int64_t batch, int64_t head) {
  return inverses + (batch * (shape.heads + shape.kv_heads) + head) * shape.tokens;
}

// Divides each row by its RMS, in place.
template <typename T>
void normalize(const MatrixView<T>& rows, Sum<T>* inverses) {
  using S = Sum<T>;
  for (int64_t i = 0; i < rows.rows; ++i) {
    T* row = rows.data + i * rows.stride;
    S squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t j = 0; j < rows.cols; ++j) {
      squares += static_cast<S>(row[j]) * static_cast<S>(row[j]);
    }
    const S inverse = 1 / std::sqrt(squares / static_cast<S>(rows.cols) + static_cast<S>(kNormEps));
    inverses[i] = inverse;
#pragma omp simd
    for (int64_t j = 0; j < rows.cols; ++j)
      row[j] = static_cast<T>(static_cast<S>(row[j]) * inverse);
  }
}

// Turns gradients with respect to rotated normalized rows into those with respect to the rows before the norm, still to
// be rotated back. A rotation keeps dot products, so the norm's gradient may be computed before it is undone.
template <typename T>
void normalize_backward(const MatrixView<const T>& rows, const Sum<T>* inverses, Sum<T>* grads) {
  using S = Sum<T>;
  for (int64_t i = 0; i < rows.rows; ++i) {
    const T* row = rows.data + i * rows.stride;
    S* grad = grads + i * rows.cols;
    S dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t j = 0; j < rows.cols; ++j) dot += static_cast<S>(row[j]) * grad[j];
    const S mean = dot / static_cast<S>(rows.cols), inverse = inverses[i];
#pragma omp simd
    for (int64_t j = 0; j < rows.cols; ++j) {
      grad[j] = inverse * (grad[j] - static_cast<S>(row[j]) * mean);
    }
  }
}

template <typename T>
void attention(
    const AttentionSizes& shape, const Rotary<Sum<T>>& rotary, T* qkv, T* out, Sum<T>* log_sums,
    Sum<T>* inverses) {
  using S = Sum<T>;
  const int64_t size = shape.head_dim, half = size / 2, shared = shape.heads / shape.kv_heads;
  const S scale = score_scale<S>(shape);
  for_kv_heads<T>(shape, [&](int64_t batch, int64_t kv_head, Tiles<T>& tiles) {
    const auto view = [&](int64_t head) { return head_view(shape, qkv, shape.row(), batch, head); };
    const auto turned = [&](int64_t head) {
      const auto rows = view(head);
      if (inverses != nullptr) normalize(rows, inverses_of(shape, inverses, batch, head));
      for (int64_t i = 0; i < shape.tokens; ++i) {
        T* row = rows.data + i * rows.stride;
        turn(row, row, rotary.cos + i * half, rotary.sin + i * half, S{1}, half);
      }
      return readable(rows);
    };
    tiles.keys_transposed.set(turned(key_head(shape, kv_head)), true);
    tiles.values.set(readable(view(value_head(shape, kv_head))), false);
    for (int64_t head = kv_head * shared; head < (kv_head + 1) * shared; ++head) {
      const auto q = turned(head);
      const auto y = head_view(shape, out, shape.width(), batch, head);
      S* log_sum = log_sums + (batch * shape.heads + head) * shape.tokens;
      for_tiles(shape.tokens, [&](const TileSpan& tile) {
        const int64_t keys = tile.keys();
        const MatrixView<S> scores{tiles.scores.data(), tile.rows, keys, keys};
        const MatrixView<T> weights{tiles.weights_of_scores(), tile.rows, keys, keys};
        const MatrixView<S> sums_of_values{tiles.output.data(), tile.rows, size, size};
        product(rows_of(q, tile.first, tile.rows), tiles.keys_transposed, keys, scores);
        for (int64_t i = 0; i < tile.rows; ++i) {
          const auto row = softmax_row(
              scores.data + i * keys, weights.data + i * keys, scale, tile.first + i + 1, keys);
          log_sum[tile.first + i] = row.log_sum;
          tiles.sums[i] = row.sum;
        }
        product(readable(weights), tiles.values, keys, sums_of_values);
        for (int64_t i = 0; i < tile.rows; ++i) {
          const S* from = sums_of_values.data + i * size;
          T* to = y.data + (tile.first + i) * y.stride;
          const S factor = 1 / tiles.sums[i];
          for (int64_t j = 0; j < size; ++j) to[j] = static_cast<T>(from[j] * factor);
        }
      });
    }
  });
}

template <typename T>
void attention_backward(
    const AttentionSizes& shape, const Rotary<Sum<T>>& rotary, const T* qkv, const T* out,
    const Sum<T>* log_sums, const Sum<T>* inverses, const T* out_grad, T* qkv_grad) {
  using S = Sum<T>;
  const int64_t size = shape.head_dim, half = size / 2, shared = shape.heads / shape.kv_heads;
  const S scale = score_scale<S>(shape);
  for_kv_heads<T>(shape, [&](int64_t batch, int64_t kv_head, Tiles<T>& tiles) {
    const auto view = [&](int64_t head) { return head_view(shape, qkv, shape.row(), batch, head); };
    const auto grad_row = [&](int64_t head, int64_t token) {
      return head_view(shape, qkv_grad, shape.row(), batch, head).data + token * shape.row();
    };
    tiles.keys.set(view(key_head(shape, kv_head)), false);
    tiles.keys_transposed.set(view(key_head(shape, kv_head)), true);
    tiles.values_transposed.set(view(value_head(shape, kv_head)), true);
    const MatrixView<S> key_grad{tiles.key_grad.data(), shape.tokens, size, size};
    const MatrixView<S> value_grad{tiles.value_grad.data(), shape.tokens, size, size};
    std::fill(tiles.key_grad.begin(), tiles.key_grad.end(), S{0});
    std::fill(tiles.value_grad.begin(), tiles.value_grad.end(), S{0});
    for (int64_t head = kv_head * shared; head < (kv_head + 1) * shared; ++head) {
      const auto q = view(head);
      const auto y = head_view(shape, out, shape.width(), batch, head);
      const auto y_grad = head_view(shape, out_grad, shape.width(), batch, head);
      const S* log_sum = log_sums + (batch * shape.heads + head) * shape.tokens;
      for_tiles(shape.tokens, [&](const TileSpan& tile) {
        const int64_t keys = tile.keys();
        const MatrixView<S> scores{tiles.scores.data(), tile.rows, keys, keys};
        const MatrixView<S> score_grads{tiles.score_grads.data(), tile.rows, keys, keys};
        const MatrixView<T> weights{tiles.weights_of_scores(), tile.rows, keys, keys};
        const MatrixView<T> weight_grads{tiles.grads_of_scores(), tile.rows, keys, keys};
        const MatrixView<S> query_grad{tiles.query_grad.data(), tile.rows, size, size};
        const auto q_tile = rows_of(q, tile.first, tile.rows);
        const auto y_grad_tile = rows_of(y_grad, tile.first, tile.rows);
        if (head + 1 < shape.heads) {
          for (const T* from : {out, out_grad}) {
            const auto next = head_view(shape, from, shape.width(), batch, head + 1);
            fetch(rows_of(next, tile.first, tile.rows));
          }
        }
        product(q_tile, tiles.keys_transposed, keys, scores);
        product(y_grad_tile, tiles.values_transposed, keys, score_grads);
        for (int64_t i = 0; i < tile.rows; ++i) {
          const int64_t token = tile.first + i;
          const T* row = y.data + token * y.stride;
          const T* row_grad = y_grad.data + token * y_grad.stride;
          S dot = 0;
#pragma omp simd reduction(+ : dot)
          for (int64_t j = 0; j < size; ++j)
            dot += static_cast<S>(row[j]) * static_cast<S>(row_grad[j]);
          softmax_row_backward(
              scores.data + i * keys, score_grads.data + i * keys, weights.data + i * keys,
              weight_grads.data + i * keys, scale, log_sum[token], dot, token + 1, keys);
        }
        product(readable(weight_grads), tiles.keys, keys, query_grad);
        product(
            readable(weight_grads), true, q_tile, false, rows_of(key_grad, 0, keys), /*add=*/true);
        product(
            readable(weights), true, y_grad_tile, false, rows_of(value_grad, 0, keys),
            /*add=*/true);
        if (inverses != nullptr) {
          normalize_backward(
              q_tile, inverses_of(shape, inverses, batch, head) + tile.first, query_grad.data);
        }
        for (int64_t i = 0; i < tile.rows; ++i) {
          const int64_t token = tile.first + i;
          turn(
              query_grad.data + i * size, grad_row(head, token), rotary.cos + token * half,
              rotary.sin + token * half, S{-1}, half);
        }
      });
    }
    if (inverses != nullptr) {
      const int64_t head = key_head(shape, kv_head);
      normalize_backward(view(head), inverses_of(shape, inverses, batch, head), key_grad.data);
    }
    for (int64_t token = 0; token < shape.tokens; ++token) {
      turn(
          key_grad.data + token * size, grad_row(key_head(shape, kv_head), token),
          rotary.cos + token * half, rotary.sin + token * half, S{-1}, half);
      const S* from = value_grad.data + token * size;
      T* to = grad_row(value_head(shape, kv_head), token);
      for (int64_t j = 0; j < size; ++j) to[j] = static_cast<T>(from[j]);
    }
  });
}

}  // namespace

constinit const AttentionKernels<float> kFloatAttention = {
    attention<float>, attention_backward<float>};
constinit const AttentionKernels<double> kDoubleAttention = {
    attention<double>, attention_backward<double>};
#ifdef GROUP_MUON_TARGET_BF16
constinit const AttentionKernels<c10::BFloat16> kBf16Attention = {
    attention<c10::BFloat16>, attention_backward<c10::BFloat16>};
#endif

}  // namespace gpt::GROUP_MUON_TARGET
