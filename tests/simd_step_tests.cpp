// Compares an engine's kernels with libtorch's autograd of the plain formulas: in fp64 to the last digits, which
// checks the formulas, and in fp32 and bf16 within rounding.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "gpt/kernels.h"
#include "gpt/model.h"
#include "gpt/vector_math.h"
#include "testing.h"

namespace gpt {
namespace {

using torch::Tensor;

class SimdStepTest : public testing::Test {
 protected:
  SimdStepTest() { torch::manual_seed(0); }
};

// The engine under test and its best precision.
const Engine kEngine = group_muon::engines_here().back();
const bool kHasBf16 = group_muon::computes_in(kEngine, torch::kBFloat16);
const auto kPrecision = kHasBf16 ? torch::kBFloat16 : torch::kFloat;

double error(const Tensor& actual, const Tensor& expected) {
  const Tensor wide = expected.to(torch::kDouble);
  return ((actual.to(torch::kDouble) - wide).norm() / wide.norm()).item<double>();
}

template <typename T>
constexpr auto kType = c10::CppTypeToScalarType<T>::value;

// The error of rounding the result once.
template <typename T>
constexpr double kTolerance = std::is_same_v<T, double>  ? 1e-13
                              : std::is_same_v<T, float> ? 1e-6
                                                         : 0.004;

// A leaf with the values of `tensor` in fp64.
Tensor leaf(const Tensor& tensor) {
  return tensor.detach().to(torch::kDouble).clone().requires_grad_();
}

template <typename T>
void check_rms_norm() {
  using S = Sum<T>;
  for (const auto& [rows, cols] :
       std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {3, 5}, {70, 33}, {100, 192}}) {
    const Tensor x = torch::randn({rows, cols}, kType<S>) * 3;
    const Tensor grad = torch::randn({rows, cols}).to(kType<T>);
    const Tensor stream = torch::randn({rows, cols}, kType<S>);
    Tensor normal = torch::empty({rows, cols}, kType<T>), inverse = torch::empty({rows}, kType<S>);
    kernels_of<T>(kEngine).rms_norm(
        x.data_ptr<S>(), normal.data_ptr<T>(), inverse.data_ptr<S>(), rows, cols);
    const Tensor wide = leaf(x);
    const Tensor expected = wide * torch::rsqrt(wide.square().mean(-1, true) + kNormEps);
    EXPECT_LT(error(normal, expected.detach()), kTolerance<T>) << rows << "x" << cols;
    expected.backward(grad.to(torch::kDouble));
    for (const bool begin : {false, true}) {
      Tensor actual = begin ? torch::full_like(stream, NAN) : stream.clone();
      Tensor scaled = torch::empty_like(normal);
      kernels_of<T>(kEngine).rms_norm_backward(
          normal.data_ptr<T>(), inverse.data_ptr<S>(), grad.data_ptr<T>(), actual.data_ptr<S>(),
          begin, scaled.data_ptr<T>(), S{0.25}, rows, cols);
      const Tensor sum = begin ? wide.grad() : wide.grad() + stream;
      // With one column the gradient is almost zero, a difference of equal numbers.
      if (cols > 1 || !begin) {
        EXPECT_LT(error(actual, sum), kTolerance<T>) << rows << "x" << cols;
        EXPECT_LT(error(scaled, sum / 4), 1.5 * kTolerance<T>) << rows << "x" << cols;
      }
    }
  }
}

TEST_F(SimdStepTest, RmsNorm) {
  check_rms_norm<double>();
  check_rms_norm<float>();
  if (kHasBf16) check_rms_norm<c10::BFloat16>();
}

template <typename T>
void check_gelu() {
  const int64_t count = 40001;  // not a multiple of any vector width
  const Tensor x = torch::linspace(-12, 12, count).to(kType<T>);
  const Tensor out_grad = torch::randn({count}).to(kType<T>);
  Tensor out = torch::empty_like(x), again = torch::empty_like(x), grad = out_grad.clone();
  kernels_of<T>(kEngine).gelu(x.data_ptr<T>(), out.data_ptr<T>(), count);
  kernels_of<T>(kEngine).gelu_backward(
      x.data_ptr<T>(), again.data_ptr<T>(), grad.data_ptr<T>(), count);
  const Tensor wide = leaf(x);
  const Tensor expected = torch::gelu(wide);
  expected.backward(out_grad.to(torch::kDouble));
  EXPECT_LT(error(out, expected.detach()), kTolerance<T>);
  EXPECT_TRUE(again.equal(out));
  EXPECT_LT(error(grad, wide.grad()), kTolerance<T>);
  EXPECT_LT(
      (out.to(torch::kDouble) - expected.detach()).abs().max().item<double>(), 12 * kTolerance<T>);
}

TEST_F(SimdStepTest, Gelu) {
  check_gelu<double>();
  check_gelu<float>();
  if (kHasBf16) check_gelu<c10::BFloat16>();
}

TEST(VectorMath, ExpIsWithinTwoUnitsAndKnowsItsEnds) {
  for (float x = -87; x <= 88; x += 0.01371F) {
    const double exact = std::exp(static_cast<double>(x));
    EXPECT_NEAR(vector_exp(x) / exact, 1, 2.4e-7) << x;
  }
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(vector_exp(0.0F), 1.0F);
  for (const float x : {-87.5F, -1e10F, -infinity}) EXPECT_EQ(vector_exp(x), 0.0F) << x;
  for (const float x : {88.5F, 600.0F, 1e10F, infinity}) EXPECT_EQ(vector_exp(x), infinity) << x;
  EXPECT_TRUE(std::isnan(vector_exp(std::numeric_limits<float>::quiet_NaN())));
}

template <typename T>
void check_cross_entropy() {
  for (const auto& shape : std::vector<std::pair<int64_t, int64_t>>{{1, 2}, {5, 17}, {64, 1000}}) {
    const int64_t rows = shape.first, cols = shape.second;
    const Tensor logits = (torch::randn({rows, cols}) * 5).to(kType<T>);
    const Tensor targets = torch::randint(0, cols, {rows}, torch::kLong);
    const Tensor wide = leaf(logits);
    const Tensor expected = torch::cross_entropy_loss(wide, targets, {}, at::Reduction::None);
    (expected.sum() * 0.3).backward();
    Tensor grad = logits.clone(), losses = torch::empty({rows}, torch::kDouble);
    const auto run = [&](double scale) {
      kernels_of<T>(kEngine).cross_entropy(
          grad.data_ptr<T>(), targets.data_ptr<int64_t>(), losses.data_ptr<double>(), scale, rows,
          cols);
    };
    run(0);
    EXPECT_TRUE(grad.equal(logits));
    EXPECT_LT(error(losses, expected.detach()), std::min(kTolerance<T>, 1e-6));
    run(0.3);
    EXPECT_LT(error(grad, wide.grad()), kTolerance<T>) << rows << "x" << cols;
  }
}

TEST_F(SimdStepTest, CrossEntropy) {
  check_cross_entropy<double>();
  check_cross_entropy<float>();
  if (kHasBf16) check_cross_entropy<c10::BFloat16>();
}

TEST_F(SimdStepTest, CrossEntropyOfHugeAndOfInfiniteLogits) {
  Tensor logits =
      torch::tensor({{3e38F, -3e38F, 0.0F}, {-INFINITY, 1.0F, 1.0F}, {NAN, 0.0F, 0.0F}});
  const Tensor targets = torch::tensor({0, 1, 1}, torch::kLong);
  Tensor losses = torch::empty({3}, torch::kDouble);
  kernels_of<float>(kEngine).cross_entropy(
      logits.data_ptr<float>(), targets.data_ptr<int64_t>(), losses.data_ptr<double>(), 1, 3, 3);
  EXPECT_EQ(losses[0].item<double>(), 0);
  EXPECT_NEAR(losses[1].item<double>(), std::log(2), 1e-7);
  EXPECT_TRUE(std::isnan(losses[2].item<double>()));
  EXPECT_EQ(logits[1][0].item<float>(), 0);
}

template <typename T>
void check_embedding() {
  const Tensor table = torch::randn({11, 37}, kType<T>), x_grad = torch::randn({50, 37}, kType<T>);
  const Tensor tokens = torch::randint(0, 11, {50}, torch::kLong);
  Tensor x = torch::empty({50, 37}, kType<T>), grad = torch::ones({11, 37}, kType<T>);
  kernels_of<T>(kEngine).embed(
      table.data_ptr<T>(), tokens.data_ptr<int64_t>(), x.data_ptr<T>(), 50, 37);
  EXPECT_TRUE(x.equal(table.index_select(0, tokens)));
  kernels_of<T>(kEngine).embed_backward(
      x_grad.data_ptr<T>(), tokens.data_ptr<int64_t>(), grad.data_ptr<T>(), 50, 37);
  const Tensor expected = torch::ones({11, 37}, kType<T>).index_add(0, tokens, x_grad);
  EXPECT_LT(error(grad, expected), kTolerance<T>);
}

TEST_F(SimdStepTest, Embedding) {
  check_embedding<float>();
  check_embedding<double>();
}

// Attention by its definition: [batch·tokens, row] → [batch·tokens, width].
Tensor plain_attention(
    const AttentionSizes& shape, const Tensor& cos, const Tensor& sin, bool qk_norm,
    const Tensor& qkv) {
  const int64_t size = shape.head_dim;
  const auto parts = qkv.view({shape.batch, shape.tokens, -1, size})
                         .split_with_sizes({shape.heads, shape.kv_heads, shape.kv_heads}, 2);
  const auto turned = [&](Tensor x) {
    if (qk_norm) x = x / (x.square().mean(-1, true) + kNormEps).sqrt();
    const auto halves = x.chunk(2, -1);
    const Tensor c = cos.unsqueeze(1), s = sin.unsqueeze(1);
    return torch::cat({halves[0] * c + halves[1] * s, halves[1] * c - halves[0] * s}, -1);
  };
  const auto heads = [&](const Tensor& x) {
    return x.repeat_interleave(shape.heads / x.size(2), 2).transpose(1, 2);
  };
  const Tensor q = heads(turned(parts[0])), k = heads(turned(parts[1])), v = heads(parts[2]);
  const Tensor seen = torch::ones({shape.tokens, shape.tokens}, torch::kBool).tril();
  const Tensor scores =
      (q.matmul(k.mT()) / std::sqrt(static_cast<double>(size))).masked_fill(~seen, -INFINITY);
  return scores.softmax(-1).matmul(v).transpose(1, 2).reshape({-1, shape.width()});
}

template <typename T>
void check_attention(bool qk_norm, double tolerance) {
  using S = Sum<T>;
  for (const AttentionSizes& shape :
       {AttentionSizes{1, 1, 1, 1, 2}, AttentionSizes{2, 5, 2, 2, 6},
        AttentionSizes{2, 70, 4, 2, 16}, AttentionSizes{1, 33, 6, 1, 10},
        AttentionSizes{1, 300, 2, 2, 64}, AttentionSizes{3, 128, 3, 3, 16},
        AttentionSizes{1, 577, 6, 2, 10}}) {
    const int64_t rows = shape.batch * shape.tokens;
    const Tensor angles = torch::rand({shape.tokens, shape.head_dim / 2}, kType<S>) * 6;
    const Tensor cos = angles.cos(), sin = angles.sin();
    const Tensor qkv = torch::randn({rows, shape.row()}).to(kType<T>);
    const Tensor out_grad = torch::randn({rows, shape.width()}).to(kType<T>);
    const Rotary<S> rotary{cos.data_ptr<S>(), sin.data_ptr<S>()};
    Tensor turned = qkv.clone(), out = torch::empty_like(out_grad), grad = torch::empty_like(qkv);
    Tensor log_sums = torch::empty({shape.batch, shape.heads, shape.tokens}, kType<S>);
    Tensor inverses = torch::full({shape.batch, shape.heads + shape.kv_heads, shape.tokens}, NAN);
    inverses = inverses.to(kType<S>);
    S* saved = qk_norm ? inverses.data_ptr<S>() : nullptr;
    attention_of<T>(kEngine).forward(
        shape, rotary, turned.data_ptr<T>(), out.data_ptr<T>(), log_sums.data_ptr<S>(), saved);
    attention_of<T>(kEngine).backward(
        shape, rotary, turned.data_ptr<T>(), out.data_ptr<T>(), log_sums.data_ptr<S>(), saved,
        out_grad.data_ptr<T>(), grad.data_ptr<T>());
    const Tensor wide = leaf(qkv);
    const Tensor expected =
        plain_attention(shape, cos.to(torch::kDouble), sin.to(torch::kDouble), qk_norm, wide);
    expected.backward(out_grad.to(torch::kDouble));
    EXPECT_LT(error(out, expected.detach()), tolerance) << shape.tokens << " tokens";
    EXPECT_LT(error(grad, wide.grad()), 2 * tolerance) << shape.tokens << " tokens";
  }
}

TEST_F(SimdStepTest, Attention) {
  for (const bool qk_norm : {false, true}) {
    check_attention<double>(qk_norm, 1e-13);
    check_attention<float>(qk_norm, 1e-6);
    if (kHasBf16) check_attention<c10::BFloat16>(qk_norm, 0.006);
  }
}

// ---------------------------------------------------------------------------------------------------
// The whole step.

struct Result {
  double loss;
  std::vector<Tensor> grads;
};

Result gradients(Model& model, const Tensor& tokens, Engine engine, double share = 1) {
  for (auto& weight : model.parameters()) weight.mutable_grad() = Tensor();
  model.set_engine(engine);
  const int64_t length = tokens.size(1) - 1;
  Result result;
  result.loss =
      model.add_gradients(tokens.narrow(1, 0, length), tokens.narrow(1, 1, length), share);
  for (const auto& weight : model.parameters()) result.grads.push_back(weight.grad().clone());
  return result;
}

double error(const Result& actual, const Result& expected) {
  double worst = 0;
  for (size_t i = 0; i < actual.grads.size(); ++i) {
    worst = std::max(worst, error(actual.grads[i], expected.grads[i]));
  }
  return worst;
}

const std::vector<ModelShape> kShapes = {
    {.layers = 1, .heads = 1, .kv_heads = 0, .width = 2, .context = 3, .vocabulary = 5},
    {.layers = 2, .heads = 4, .kv_heads = 0, .width = 32, .context = 16, .vocabulary = 64},
    {.layers = 2, .heads = 6, .kv_heads = 2, .width = 60, .context = 37, .vocabulary = 131},
    {.layers = 3, .heads = 3, .kv_heads = 1, .width = 48, .context = 70, .vocabulary = 300},
    {.layers = 2,
     .heads = 3,
     .kv_heads = 0,
     .width = 48,
     .context = 40,
     .vocabulary = 64,
     .qk_norm = true},
    {.layers = 2,
     .heads = 6,
     .kv_heads = 2,
     .width = 60,
     .context = 37,
     .vocabulary = 131,
     .qk_norm = true},
};

// Tables of rotations that are exact in fp64. Those of the model are fp32 numbers, so they also stretch by 1e-8, which
// autograd sees and the gradient of queries' and keys' norms does not.
void make_rotations_exact(Model& model) {
  const torch::NoGradGuard no_grad;
  const auto tables = model.named_buffers();
  const Tensor cos = tables["rotary_cos"], sin = tables["rotary_sin"];
  const Tensor radius = (cos.square() + sin.square()).sqrt();
  cos.div_(radius);
  sin.div_(radius);
}

TEST_F(SimdStepTest, StepEqualsAutogradInFp64) {
  for (const auto& shape : kShapes) {
    Model model(shape, torch::kDouble, 1);
    model.to(torch::kDouble);
    make_rotations_exact(model);
    const Tensor tokens = torch::randint(0, shape.vocabulary, {3, shape.context + 1}, torch::kLong);
    const auto expected = gradients(model, tokens, Engine::kPortable, 0.7);
    const auto actual = gradients(model, tokens, kEngine, 0.7);
    EXPECT_NEAR(actual.loss, expected.loss, 1e-12) << shape.width;
    EXPECT_LT(error(actual, expected), 1e-11) << shape.width;
  }
}

void check_numerical_derivatives(const ModelShape& shape) {
  Model model(shape, torch::kDouble, 1);
  model.to(torch::kDouble);
  model.set_engine(kEngine);
  const Tensor tokens = torch::randint(0, shape.vocabulary, {2, shape.context + 1}, torch::kLong);
  const Tensor in = tokens.narrow(1, 0, shape.context), out = tokens.narrow(1, 1, shape.context);
  model.add_gradients(in, out, 1);
  const torch::NoGradGuard no_grad;
  for (const auto& item : model.named_parameters()) {
    const Tensor weight = item.value(), kept = weight.clone();
    const Tensor direction = torch::randn_like(weight) / std::sqrt(weight.numel());
    const double step = 1e-4;
    weight.copy_(kept + step * direction);
    const double above = model.evaluate(in, out);
    weight.copy_(kept - step * direction);
    const double below = model.evaluate(in, out);
    weight.copy_(kept);
    const double expected = (weight.grad() * direction).sum().item<double>();
    EXPECT_NEAR((above - below) / (2 * step), expected, 1e-7 + 1e-4 * std::abs(expected))
        << item.key();
  }
}

TEST_F(SimdStepTest, StepEqualsNumericalDerivativesInFp64) {
  check_numerical_derivatives(kShapes[2]);
  check_numerical_derivatives(kShapes.back());
}

TEST_F(SimdStepTest, StepIsWithinRoundingInFp32AndBf16) {
  for (const auto& shape : kShapes) {
    const Tensor tokens = torch::randint(0, shape.vocabulary, {3, shape.context + 1}, torch::kLong);
    Model model(shape, torch::kFloat, 1);
    const auto expected = gradients(model, tokens, Engine::kPortable);
    const auto fp32 = gradients(model, tokens, kEngine);
    EXPECT_NEAR(fp32.loss, expected.loss, 1e-5) << shape.width;
    EXPECT_LT(error(fp32, expected), 1e-5) << shape.width;
    if (!kHasBf16) continue;
    // In bf16, no farther from fp32 than libtorch.
    model.set_precision(torch::kBFloat16);
    const auto portable = gradients(model, tokens, Engine::kPortable);
    const auto ours = gradients(model, tokens, kEngine);
    EXPECT_NEAR(ours.loss, expected.loss, 0.01 * expected.loss) << shape.width;
    EXPECT_LT(error(ours, expected), 1.2 * error(portable, expected) + 0.005) << shape.width;
  }
}

TEST_F(SimdStepTest, GradientsAddUp) {
  const auto& shape = kShapes[1];
  Model model(shape, torch::kFloat, 1);
  const Tensor tokens = torch::randint(0, shape.vocabulary, {4, shape.context + 1}, torch::kLong);
  const auto whole = gradients(model, tokens, kEngine);
  gradients(model, tokens.narrow(0, 0, 1), kEngine, 0.25);
  const Tensor rest = tokens.narrow(0, 1, 3);
  model.add_gradients(rest.narrow(1, 0, shape.context), rest.narrow(1, 1, shape.context), 0.75);
  for (size_t i = 0; i < whole.grads.size(); ++i) {
    EXPECT_LT(error(model.parameters()[i].grad(), whole.grads[i]), 1e-6);
  }
}

TEST_F(SimdStepTest, CopiesFollowTheWeights) {
  const auto& shape = kShapes[1];
  Model model(shape, kPrecision, 1);
  model.set_engine(kEngine);
  const Tensor tokens = torch::randint(0, shape.vocabulary, {4, shape.context + 1}, torch::kLong);
  const Tensor in = tokens.narrow(1, 0, shape.context), out = tokens.narrow(1, 1, shape.context);
  const double before = model.evaluate(in, out);
  EXPECT_EQ(model.evaluate(in, out), before);
  for (const auto& weight : model.parameters()) {
    const torch::NoGradGuard no_grad;
    weight.mul_(1.5);
    const double after = model.evaluate(in, out);
    EXPECT_NE(after, before);
    weight.div_(1.5);
  }
  EXPECT_NEAR(model.evaluate(in, out), before, 1e-3);
}

TEST_F(SimdStepTest, LogitsOfALargeVocabularyAreCutIntoChunks) {
  // 300 rows of 65536 entries in fp32: two chunks of at most 64 MB.
  const ModelShape shape = {
      .layers = 1, .heads = 2, .kv_heads = 0, .width = 8, .context = 100, .vocabulary = 65536};
  Model model(shape, torch::kFloat, 1);
  const Tensor tokens = torch::randint(0, shape.vocabulary, {3, shape.context + 1}, torch::kLong);
  const auto expected = gradients(model, tokens, Engine::kPortable);
  const auto actual = gradients(model, tokens, kEngine);
  EXPECT_NEAR(actual.loss, expected.loss, 1e-5);
  EXPECT_LT(error(actual, expected), 2e-5);
}

TEST_F(SimdStepTest, ShorterAndLongerBatchesFollowEachOther) {
  const auto& shape = kShapes[2];
  Model model(shape, torch::kFloat, 1);
  const auto tokens_of = [&](int64_t batch, int64_t length) {
    return torch::randint(0, shape.vocabulary, {batch, length + 1}, torch::kLong);
  };
  for (const auto& tokens : {tokens_of(2, 20), tokens_of(4, 37), tokens_of(1, 5)}) {
    EXPECT_LT(
        error(gradients(model, tokens, kEngine), gradients(model, tokens, Engine::kPortable)),
        1e-5);
  }
}

TEST_F(SimdStepTest, BadInputIsRefusedAndLeavesNoGradients) {
  const auto& shape = kShapes[1];
  Model model(shape, kPrecision, 1);
  model.set_engine(kEngine);
  const Tensor good = torch::zeros({2, shape.context}, torch::kLong);
  const auto refused = [&](const Tensor& tokens, const Tensor& targets, const char* words) {
    EXPECT_ERROR_SAYS(model.add_gradients(tokens, targets, 1), words);
    EXPECT_ERROR_SAYS(model.evaluate(tokens, targets), words);
    for (const auto& weight : model.parameters()) EXPECT_FALSE(weight.grad().defined());
  };
  refused(good + shape.vocabulary, good, "tokens should be from 0 to 63, but range from 64 to 64");
  refused(good, good - 100, "targets should be from 0 to 63");
  refused(good, good.narrow(0, 0, 1), "tokens and targets should have the same shape");
  refused(good.to(torch::kInt), good, "matrix of int64");
  refused(good.narrow(0, 0, 0), good.narrow(0, 0, 0), "matrix of int64");
  refused(good.repeat({1, 2}), good.repeat({1, 2}), "more than the context of 16");
  EXPECT_ERROR_SAYS(model.add_gradients(good, good, 0), "should not be 0");
}

TEST_F(SimdStepTest, FrozenWeightsGetNoGradient) {
  const auto& shape = kShapes[1];
  Model model(shape, torch::kFloat, 1);
  const Tensor tokens = torch::randint(0, shape.vocabulary, {2, shape.context + 1}, torch::kLong);
  const auto all = gradients(model, tokens, kEngine);
  auto weights = model.parameters();
  for (const size_t frozen : {size_t{0}, size_t{3}}) {
    for (auto& weight : weights) weight.mutable_grad() = Tensor();
    weights[frozen].set_requires_grad(false);
    model.add_gradients(tokens.narrow(1, 0, shape.context), tokens.narrow(1, 1, shape.context), 1);
    for (size_t i = 0; i < weights.size(); ++i) {
      EXPECT_EQ(weights[i].grad().defined(), i != frozen);
      if (i != frozen) {
        EXPECT_TRUE(weights[i].grad().equal(all.grads[i]));
      }
    }
    weights[frozen].set_requires_grad(true);
  }
}

TEST_F(SimdStepTest, WhatAnEngineDoesNotComputeInIsPortable) {
  const auto& shape = kShapes[1];
  Model model(shape, torch::kHalf, 1);  // none of our engines has it
  const Tensor tokens = torch::randint(0, shape.vocabulary, {2, shape.context + 1}, torch::kLong);
  const auto expected = gradients(model, tokens, Engine::kPortable);
  const auto actual = gradients(model, tokens, kEngine);
  EXPECT_EQ(actual.loss, expected.loss);
  EXPECT_EQ(error(actual, expected), 0);
}

}  // namespace
}  // namespace gpt
