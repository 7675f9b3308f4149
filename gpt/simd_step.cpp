#include "gpt/simd_step.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "gpt/kernels.h"
#include "group_muon/products.h"

namespace gpt {
namespace {

using group_muon::MatrixView;
using group_muon::Product;
using group_muon::readable;
using torch::Tensor;

// Logits are computed in chunks of rows. A chunk of kCachedLogitBytes stays in cache between the products that use
// it. With fewer than kLogitRows rows, packing for those products does not pay. kLogitBytes is the upper limit.
constexpr int64_t kCachedLogitBytes = 8 << 20;
constexpr int64_t kLogitRows = 512;
constexpr int64_t kLogitBytes = 64 << 20;
// Products with a longer inner dimension are summed in parts that fit in cache.
constexpr int64_t kLongestDepth = 4096;

template <typename T>
constexpr auto kType = c10::CppTypeToScalarType<T>::value;

// A contiguous matrix in one of our buffers.
template <typename T>
MatrixView<T> matrix(const Tensor& tensor, int64_t rows, int64_t cols) {
  return {tensor.data_ptr<std::remove_const_t<T>>(), rows, cols, cols};
}

template <typename T>
Tensor as_tensor(const MatrixView<T>& view) {
  using Plain = std::remove_const_t<T>;
  return at::from_blob(
      const_cast<Plain*>(view.data), {view.rows, view.cols}, {view.stride, 1}, kType<Plain>);
}

// out = alpha·A·B, or out += alpha·A·B if `add`.
template <typename In, typename Out>
void product(Engine engine, Product<In, Out> p, bool add, Sum<In> alpha = 1) {
  if constexpr (!std::is_same_v<In, double>) {
    p.alpha = alpha;
    p.d = add ? p.out.data : nullptr;
    p.beta = 1;
    group_muon::multiply_shared(engine, p);
  } else {  // for tests only
    const Tensor a = as_tensor(p.a), b = as_tensor(p.b);
    as_tensor(p.out).addmm_(
        p.transpose_a ? a.t() : a, p.transpose_b ? b.t() : b, add ? 1 : 0, alpha);
  }
}

template <typename T>
class SimdStepOf : public SimdStep {
 public:
  using S = Sum<T>;

  SimdStepOf(Engine engine, const ModelShape& shape, const Weights& weights, Profile& profile)
      : engine_(engine),
        kernels_(kernels_of<T>(engine)),
        attention_(attention_of<T>(engine)),
        shape_(shape),
        weights_(weights),
        profile_(profile),
        layers_(shape.layers) {}

  double run(const Tensor& tokens, const Tensor& targets, double share) override {
    const torch::NoGradGuard no_grad;
    check_ids(tokens, "tokens");
    check_ids(targets, "targets");
    TORCH_CHECK_VALUE(
        tokens.sizes() == targets.sizes(), "tokens and targets should have the same shape, not ",
        tokens.sizes(), " and ", targets.sizes());
    const Tensor in = tokens.contiguous(), wanted = targets.contiguous();
    prepare(in.size(0), in.size(1), share != 0);
    forward(in.const_data_ptr<int64_t>(), share != 0);
    const double mean = loss(wanted.const_data_ptr<int64_t>(), share);
    if (share != 0) {
      backward(in.const_data_ptr<int64_t>());
      publish_gradients();
    }
    return mean;
  }

 private:
  void check_ids(const Tensor& ids, const char* name) const {
    TORCH_CHECK_VALUE(
        ids.dim() == 2 && ids.scalar_type() == at::kLong && ids.is_cpu() && ids.numel() > 0, name,
        " should be a matrix of int64 on the CPU, not ", ids.sizes(), " of ", ids.scalar_type());
    TORCH_CHECK_VALUE(
        ids.size(1) <= shape_.context, name, " has ", ids.size(1),
        " columns, more than the context of ", shape_.context);
    const auto [least, most] = at::aminmax(ids);
    TORCH_CHECK_VALUE(
        least.item<int64_t>() >= 0 && most.item<int64_t>() < shape_.vocabulary, name,
        " should be from 0 to ", shape_.vocabulary - 1, ", but range from ", least.item<int64_t>(),
        " to ", most.item<int64_t>());
  }

  // A weight, its copy in the precision of products, and its gradient while it is being computed.
  struct Copy {
    Tensor master = {};
    Tensor copy = {};
    uint32_t version = 0;
    Tensor gradient = {};  // the weight's own, or a new one for it; undefined if frozen
    bool add = false;      // the gradient already has a value to add to

    MatrixView<const T> view() const { return matrix<const T>(copy, copy.size(0), copy.size(1)); }
    MatrixView<S> grad() const { return matrix<S>(gradient, master.size(0), master.size(1)); }
  };

  // A layer's weights and what the backward pass needs.
  struct Layer {
    Copy qkv_weight, out_weight, up_weight, down_weight;
    Tensor normal1, inverse1, qkv, log_sums, qk_inverses, heads, normal2, inverse2, up;
  };

  static constexpr int64_t kMlp = 4;  // MLP width as a multiple of the model's width

  void prepare(int64_t batch, int64_t tokens, bool with_gradients) {
    const auto timed = Timed(profile_, Part::kWeights);
    attention_sizes_ = {batch, tokens, shape_.heads, shape_.key_heads(), shape_.head_dim()};
    rows_ = batch * tokens;
    refresh(embedding_, weights_.wte, with_gradients);
    for (int64_t i = 0; i < shape_.layers; ++i) {
      const auto& block = weights_.blocks[i];
      refresh(layers_[i].qkv_weight, block.attn_c_attn, with_gradients);
      refresh(layers_[i].out_weight, block.attn_c_proj, with_gradients);
      refresh(layers_[i].up_weight, block.mlp_c_fc, with_gradients);
      refresh(layers_[i].down_weight, block.mlp_c_proj, with_gradients);
    }
  }

  // Updates the copy if the weight has changed, and sets up its gradient.
  void refresh(Copy& copy, const Tensor& master, bool with_gradients) {
    const auto version = static_cast<uint32_t>(master._version());
    if (!copy.copy.defined() || copy.version != version || !copy.master.is_same(master)) {
      copy.master = master;
      copy.version = version;
      if (kType<T> == master.scalar_type()) {
        copy.copy = master.detach();
      } else if (copy.copy.defined()) {
        copy.copy.copy_(master);
      } else {
        copy.copy = master.detach().to(kType<T>);
      }
    }
    copy.gradient = Tensor();
    if (!with_gradients || !master.requires_grad()) return;
    copy.add = master.grad().defined();
    copy.gradient = copy.add ? master.grad() : at::empty_like(master.detach());
    TORCH_CHECK_VALUE(
        copy.gradient.is_contiguous() && copy.gradient.scalar_type() == kType<S>,
        "engines other than portable need contiguous gradients of type ", kType<S>);
  }

  void publish_gradients() {
    const auto publish = [](Copy& weight) {
      if (weight.gradient.defined()) weight.master.mutable_grad() = weight.gradient;
    };
    publish(embedding_);
    for (auto& layer : layers_) {
      for (auto* weight :
           {&layer.qkv_weight, &layer.out_weight, &layer.up_weight, &layer.down_weight}) {
        publish(*weight);
      }
    }
  }

  // A buffer with room for rows × cols elements, reused by later batches.
  template <typename E>
  E* room(Tensor& buffer, int64_t rows, int64_t cols) {
    if (!buffer.defined() || buffer.numel() < rows * cols)
      buffer = at::empty({rows * cols}, kType<E>);
    return buffer.data_ptr<E>();
  }
  template <typename E>
  MatrixView<E> room_for(Tensor& buffer, int64_t cols) {
    return {room<E>(buffer, rows_, cols), rows_, cols, cols};
  }

  // Buffers for a layer's activations. Without gradients all layers share those of the first.
  Layer& saved(int64_t layer, bool with_gradients) { return layers_[with_gradients ? layer : 0]; }

  // out = alpha·X·Wᵀ, or out += alpha·X·Wᵀ if `add`.
  template <typename Out>
  void linear(
      const MatrixView<const T>& x, const Copy& weight, const MatrixView<Out>& out, S alpha = 1,
      bool add = false) {
    const auto timed = Timed(profile_, Part::kMatmul);
    product(
        engine_, Product<T, Out>{.a = x, .b = weight.view(), .out = out, .transpose_b = true}, add,
        alpha);
  }

  // Gradient of Y = XWᵀ with respect to X.
  template <typename Out>
  void input_backward(
      const MatrixView<const T>& y_grad, const Copy& weight, const MatrixView<Out>& x_grad) {
    const auto timed = Timed(profile_, Part::kMatmul);
    const auto w = weight.view();
    // Only sums in S may be split into parts.
    const int64_t part = std::is_same_v<Out, S> ? std::min(kLongestDepth, w.rows) : w.rows;
    for (int64_t k = 0; k < w.rows; k += part) {
      const int64_t depth = std::min(part, w.rows - k);
      product(
          engine_,
          Product<T, Out>{
              .a = {y_grad.data + k, y_grad.rows, depth, y_grad.stride},
              .b = {w.data + k * w.stride, depth, w.cols, w.stride},
              .out = x_grad},
          k > 0);
    }
  }

  // Gradient with respect to W, added to the weight's gradient.
  void weight_backward(
      const MatrixView<const T>& y_grad, const MatrixView<const T>& x, Copy& weight) {
    if (!weight.gradient.defined()) return;
    const auto timed = Timed(profile_, Part::kMatmul);
    for (int64_t k = 0; k < x.rows; k += kLongestDepth) {
      const int64_t depth = std::min(kLongestDepth, x.rows - k);
      product(
          engine_,
          Product<T, S>{
              .a = {y_grad.data + k * y_grad.stride, depth, y_grad.cols, y_grad.stride},
              .b = {x.data + k * x.stride, depth, x.cols, x.stride},
              .out = weight.grad(),
              .transpose_a = true},
          weight.add);
      weight.add = true;
    }
  }

  void normalize(Tensor& normal, Tensor& inverse) {
    const auto timed = Timed(profile_, Part::kNorm);
    kernels_.rms_norm(
        stream_.data_ptr<S>(), room<T>(normal, rows_, shape_.width), room<S>(inverse, rows_, 1),
        rows_, shape_.width);
  }

  // Also writes stream_grad_·scale to layer_grad_.
  template <typename G>
  void normalize_backward(
      const Tensor& normal, const Tensor& inverse, const G* normal_grad, bool begin, S scale) {
    const auto timed = Timed(profile_, Part::kNorm);
    const auto backward = [&] {
      if constexpr (std::is_same_v<G, T>) {
        return kernels_.rms_norm_backward;
      } else {
        return kernels_.rms_norm_backward_of_sums;
      }
    }();
    backward(
        normal.const_data_ptr<T>(), inverse.const_data_ptr<S>(), normal_grad,
        room<S>(stream_grad_, rows_, shape_.width), begin,
        room<T>(layer_grad_, rows_, shape_.width), scale, rows_, shape_.width);
  }

  Rotary<S> rotary() const {
    return {weights_.cos.const_data_ptr<S>(), weights_.sin.const_data_ptr<S>()};
  }

  // Where the norms of a layer's queries and keys are kept; null if they are not normalized.
  S* qk_inverses(Layer& layer) {
    return shape_.qk_norm ? room<S>(layer.qk_inverses, rows_, shape_.heads + shape_.key_heads())
                          : nullptr;
  }

  S attention_scale() const { return 1 / std::sqrt(static_cast<S>(2 * shape_.layers)); }

  void forward(const int64_t* tokens, bool with_gradients) {
    const int64_t width = shape_.width;
    const MatrixView<S> stream = room_for<S>(stream_, width);
    {
      const auto timed = Timed(profile_, Part::kLoss);
      kernels_.embed(weights_.wte.template const_data_ptr<S>(), tokens, stream.data, rows_, width);
    }
    for (int64_t i = 0; i < shape_.layers; ++i) {
      const Layer& weights = layers_[i];
      Layer& layer = saved(i, with_gradients);
      normalize(layer.normal1, layer.inverse1);
      const auto qkv = room_for<T>(layer.qkv, attention_sizes_.row());
      const auto heads = room_for<T>(layer.heads, width);
      linear(matrix<const T>(layer.normal1, rows_, width), weights.qkv_weight, qkv);
      {
        const auto timed = Timed(profile_, Part::kAttention);
        attention_.forward(
            attention_sizes_, rotary(), qkv.data, heads.data,
            room<S>(layer.log_sums, rows_, shape_.heads), qk_inverses(layer));
      }
      linear(readable(heads), weights.out_weight, stream, attention_scale(), /*add=*/true);
      normalize(layer.normal2, layer.inverse2);
      const auto up = room_for<T>(layer.up, kMlp * width);
      const auto active = room_for<T>(active_, kMlp * width);
      linear(matrix<const T>(layer.normal2, rows_, width), weights.up_weight, up);
      {
        const auto timed = Timed(profile_, Part::kActivation);
        kernels_.gelu(up.data, active.data, rows_ * kMlp * width);
      }
      linear(readable(active), weights.down_weight, stream, S{1}, /*add=*/true);
    }
    normalize(last_normal_, last_inverse_);
  }

  // Mean loss. With gradients, also computes those of the last norm's output and of the head. Works on one chunk of
  // logit rows at a time.
  double loss(const int64_t* targets, double share) {
    const int64_t vocabulary = shape_.vocabulary, width = shape_.width;
    // Chunks of equal size, a multiple of 16 rows.
    const int64_t row_bytes = vocabulary * static_cast<int64_t>(sizeof(T));
    const int64_t wanted = std::max(kCachedLogitBytes / row_bytes, kLogitRows);
    const int64_t most = std::max<int64_t>(1, std::min(wanted, kLogitBytes / row_bytes));
    const int64_t chunks = (rows_ + most - 1) / most;
    const int64_t even = (rows_ + chunks - 1) / chunks;
    const int64_t chunk = std::min(rows_, (even + 15) / 16 * 16);
    T* logits = room<T>(logits_, chunk, vocabulary);
    const MatrixView<S> normal_grad = room_for<S>(normal_grad_, width);
    losses_.resize(rows_);
    for (int64_t row = 0; row < rows_; row += chunk) {
      const int64_t rows = std::min(chunk, rows_ - row);
      const MatrixView<T> view{logits, rows, vocabulary, vocabulary};
      const MatrixView<const T> x{
          last_normal_.template const_data_ptr<T>() + row * width, rows, width, width};
      linear(x, embedding_, view);
      {
        const auto timed = Timed(profile_, Part::kLoss);
        kernels_.cross_entropy(
            logits, targets + row, losses_.data() + row, share / static_cast<double>(rows_), rows,
            vocabulary);
      }
      if (share == 0) continue;
      const MatrixView<S> x_grad{normal_grad.data + row * width, rows, width, width};
      input_backward(readable(view), embedding_, x_grad);
      weight_backward(readable(view), x, embedding_);
    }
    return std::accumulate(losses_.begin(), losses_.end(), 0.0) / static_cast<double>(rows_);
  }

  void backward(const int64_t* tokens) {
    const int64_t width = shape_.width;
    normalize_backward(
        last_normal_, last_inverse_, normal_grad_.const_data_ptr<S>(), /*begin=*/true, S{1});
    const auto layer_grad = matrix<const T>(layer_grad_, rows_, width);
    const auto wide_grad = room_for<T>(wide_grad_, kMlp * width);
    const auto qkv_grad = room_for<T>(wide_grad_, attention_sizes_.row());
    const auto narrow_grad = room_for<T>(narrow_grad_, width);
    for (int64_t i = shape_.layers; i-- > 0;) {
      Layer& layer = layers_[i];
      // MLP. The activation is recomputed before the weight's gradient needs it.
      input_backward(layer_grad, layer.down_weight, wide_grad);
      {
        const auto timed = Timed(profile_, Part::kActivation);
        kernels_.gelu_backward(
            layer.up.template const_data_ptr<T>(), active_.data_ptr<T>(), wide_grad.data,
            rows_ * kMlp * width);
      }
      weight_backward(layer_grad, matrix<const T>(active_, rows_, kMlp * width), layer.down_weight);
      input_backward(readable(wide_grad), layer.up_weight, narrow_grad);
      weight_backward(
          readable(wide_grad), matrix<const T>(layer.normal2, rows_, width), layer.up_weight);
      normalize_backward(layer.normal2, layer.inverse2, narrow_grad.data, false, attention_scale());
      // Attention.
      input_backward(layer_grad, layer.out_weight, narrow_grad);
      weight_backward(layer_grad, matrix<const T>(layer.heads, rows_, width), layer.out_weight);
      {
        const auto timed = Timed(profile_, Part::kAttention);
        attention_.backward(
            attention_sizes_, rotary(), layer.qkv.template const_data_ptr<T>(),
            layer.heads.template const_data_ptr<T>(), layer.log_sums.template const_data_ptr<S>(),
            qk_inverses(layer), narrow_grad.data, qkv_grad.data);
      }
      input_backward(readable(qkv_grad), layer.qkv_weight, narrow_grad);
      weight_backward(
          readable(qkv_grad), matrix<const T>(layer.normal1, rows_, width), layer.qkv_weight);
      normalize_backward(layer.normal1, layer.inverse1, narrow_grad.data, false, S{1});
    }
    if (!embedding_.gradient.defined()) return;
    const auto timed = Timed(profile_, Part::kLoss);
    kernels_.embed_backward(
        stream_grad_.const_data_ptr<S>(), tokens, embedding_.grad().data, rows_, width);
  }

  Engine engine_;
  const Kernels<T>& kernels_;
  const AttentionKernels<T>& attention_;
  ModelShape shape_;
  Weights weights_;
  Profile& profile_;
  AttentionSizes attention_sizes_;
  int64_t rows_ = 0;  // number of tokens in the batch
  Copy embedding_;
  std::vector<Layer> layers_;
  Tensor stream_, stream_grad_;                      // [rows, width] in S
  Tensor last_normal_, last_inverse_, normal_grad_;  // of the norm before the head
  Tensor active_, wide_grad_, narrow_grad_, layer_grad_, logits_;
  std::vector<double> losses_;
};

}  // namespace

std::unique_ptr<SimdStep> make_simd_step(
    Engine engine, const ModelShape& shape, const Weights& weights, torch::ScalarType precision,
    Profile& profile) {
  switch (precision) {
    case at::kBFloat16:
      return std::make_unique<SimdStepOf<c10::BFloat16>>(engine, shape, weights, profile);
    case at::kFloat:
      return std::make_unique<SimdStepOf<float>>(engine, shape, weights, profile);
    case at::kDouble:
      return std::make_unique<SimdStepOf<double>>(engine, shape, weights, profile);
    default:
      TORCH_CHECK_VALUE(
          false, "engine ", group_muon::to_string(engine), " has no matrix products in ",
          precision);
  }
}

}  // namespace gpt
