#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

#include "gpt/generate.h"
#include "gpt/model.h"
#include "tests/testing.h"

namespace {

using gpt::Model;
using gpt::ModelShape;
using torch::Tensor;

const ModelShape kTiny = {
    .layers = 2, .heads = 4, .kv_heads = 0, .width = 32, .context = 16, .vocabulary = 64};

Tensor random_tokens(const ModelShape& shape, int64_t batch, uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  return at::randint(0, shape.vocabulary, {batch, shape.context + 1}, generator, at::kLong);
}

Tensor loss_of(Model& model, const Tensor& tokens) {
  const int64_t context = model.shape().context;
  return model.loss(tokens.narrow(1, 0, context), tokens.narrow(1, 1, context));
}

TEST(ModelTest, GPT2SmallHasTheRecipesParameters) {
  EXPECT_EQ(ModelShape().head_dim(), 64);
  const Model model({}, torch::kFloat32, 0);
  int64_t count = 0;
  for (const auto& weight : model.parameters()) count += weight.numel();
  EXPECT_EQ(count, 123'532'032);
  const auto named = model.named_parameters();
  EXPECT_EQ(named.size(), 1 + 12 * 4);
  EXPECT_EQ(named["transformer.wte.weight"].sizes(), (std::vector<int64_t>{50257, 768}));
  EXPECT_EQ(
      named["transformer.h.11.attn.c_attn.weight"].sizes(), (std::vector<int64_t>{2304, 768}));
  EXPECT_EQ(named["transformer.h.0.mlp.c_proj.weight"].sizes(), (std::vector<int64_t>{768, 3072}));
}

TEST(ModelTest, WeightsAreUniformWithinOneOverRootFanIn) {
  const Model model(kTiny, torch::kFloat32, 3);
  for (const auto& item : model.named_parameters()) {
    const double bound = 1 / std::sqrt(static_cast<double>(item.value().size(1)));
    EXPECT_LE(item.value().abs().max().item<double>(), bound) << item.key();
    EXPECT_GT(item.value().abs().max().item<double>(), 0.97 * bound) << item.key();
    EXPECT_NEAR(item.value().std().item<double>(), bound / std::sqrt(3), 0.05 * bound);
  }
}

TEST(ModelTest, InitialLossIsNearTheLogarithmOfTheVocabulary) {
  for (const auto precision : {torch::kFloat32, torch::kBFloat16}) {
    ModelShape shape = kTiny;
    shape.vocabulary = 4096;
    Model model(shape, precision, 0);
    const double loss = loss_of(model, random_tokens(shape, 32, 1)).item<double>();
    EXPECT_NEAR(loss, std::log(4096), 0.04 * std::log(4096));
  }
}

TEST(ModelTest, SameSeedSameWeightsAnotherSeedOthers) {
  Model a(kTiny, torch::kFloat32, 5), b(kTiny, torch::kFloat32, 5), c(kTiny, torch::kFloat32, 6);
  const Tensor tokens = random_tokens(kTiny, 4, 0);
  EXPECT_TRUE(loss_of(a, tokens).equal(loss_of(b, tokens)));
  EXPECT_FALSE(loss_of(a, tokens).equal(loss_of(c, tokens)));
}

TEST(ModelTest, LossIsTheMeanOverPrefixesSoNoTokenSeesLaterOnes) {
  Model model(kTiny, torch::kFloat32, 0);
  const torch::NoGradGuard no_grad;
  const Tensor tokens = random_tokens(kTiny, 2, 0);
  Tensor sum = torch::zeros({});
  for (int64_t n = 1; n <= kTiny.context; ++n) {
    gpt::KeyValueCache cache;
    const Tensor logits = model.next_logits(tokens.slice(1, 0, n), cache);
    sum += torch::nn::functional::cross_entropy(logits, tokens.select(1, n));
  }
  EXPECT_NEAR(loss_of(model, tokens).item<double>(), sum.item<double>() / kTiny.context, 1e-5);
}

TEST(ModelTest, ATinyModelOverfitsOneBatch) {
  for (const auto precision : {torch::kFloat32, torch::kBFloat16}) {
    Model model(kTiny, precision, 0);
    const Tensor tokens = random_tokens(kTiny, 4, 1);
    torch::optim::Adam optimizer(model.parameters(), torch::optim::AdamOptions(1e-2));
    double loss = 0;
    for (int step = 0; step < 300; ++step) {
      optimizer.zero_grad();
      const Tensor mean = loss_of(model, tokens);
      mean.backward();
      optimizer.step();
      loss = mean.item<double>();
    }
    EXPECT_LT(loss, 0.05) << precision;
  }
}

TEST(ModelTest, CachedLogitsEqualThoseOfTheWholeText) {
  for (const int64_t kv_heads : {0, 1, 2}) {
    ModelShape shape = kTiny;
    shape.kv_heads = kv_heads;
    shape.qk_norm = kv_heads != 1;
    Model model(shape, torch::kFloat32, 2);
    const torch::NoGradGuard no_grad;
    const Tensor tokens = random_tokens(shape, 3, 4).slice(1, 0, shape.context);
    gpt::KeyValueCache cache;
    Tensor cached = model.next_logits(tokens.slice(1, 0, 5), cache);
    for (int64_t n = 5; n < shape.context; ++n) {
      gpt::KeyValueCache fresh;
      const Tensor whole = model.next_logits(tokens.slice(1, 0, n), fresh);
      EXPECT_TRUE(cached.allclose(whole, 1e-5, 5e-6)) << "after " << n << " tokens";
      cached = model.next_logits(tokens.slice(1, n, n + 1), cache);
    }
    EXPECT_EQ(cache.tokens, shape.context);
    EXPECT_ERROR_SAYS(model.next_logits(tokens.slice(1, 0, 1), cache), "context of 16 tokens");
  }
}

TEST(ModelTest, AllKeyHeadsAsManyAsHeadsIsTheSameAsUnset) {
  ModelShape shape = kTiny;
  shape.kv_heads = kTiny.heads;
  Model a(kTiny, torch::kFloat32, 0), b(shape, torch::kFloat32, 0);
  const Tensor tokens = random_tokens(kTiny, 2, 0);
  EXPECT_TRUE(loss_of(a, tokens).equal(loss_of(b, tokens)));
}

TEST(ModelTest, NormsOfQueriesAndKeysMakeTheirSizeIrrelevant) {
  ModelShape shape = kTiny;
  const Tensor tokens = random_tokens(shape, 2, 0);
  for (const bool qk_norm : {false, true}) {
    shape.qk_norm = qk_norm;
    Model model(shape, torch::kFloat32, 0);
    const Tensor before = loss_of(model, tokens);
    {
      const torch::NoGradGuard no_grad;
      const Tensor weight = model.named_parameters()["transformer.h.0.attn.c_attn.weight"];
      weight.narrow(0, 0, 2 * shape.width).mul_(8);
    }
    EXPECT_EQ(loss_of(model, tokens).allclose(before, 1e-5, 1e-5), qk_norm);
  }
}

TEST(ModelTest, FlopsAreSixPerWeightAndTokenPlusAttention) {
  // Per token, causal attention has layers·width·context multiply-adds. Each, like each weight, takes six operations.
  const double weights = 123'532'032;
  EXPECT_NEAR(
      gpt::training_flops_per_token({}), 6 * weights + 6 * 12.0 * 768 * 1024, 1e-6 * 6 * weights);
}

TEST(ModelTest, ShapesThatMakeNoSenseAreRefusedByName) {
  const auto check = [](auto change) {
    ModelShape shape = kTiny;
    change(shape);
    Model(shape, torch::kFloat32, 0);
  };
  EXPECT_ERROR_SAYS(check([](auto& s) { s.heads = 5; }), "5 heads do not divide a width of 32");
  EXPECT_ERROR_SAYS(check([](auto& s) { s.kv_heads = 3; }), "3 does not divide 4");
  EXPECT_ERROR_SAYS(check([](auto& s) { s.heads = 32; }), "head size should be even");
  EXPECT_ERROR_SAYS(check([](auto& s) { s.layers = 0; }), "layers should be 1 or more, not 0");
  EXPECT_ERROR_SAYS(check([](auto& s) { s.vocabulary = 70000; }), "65536");
}

std::vector<uint32_t> generated(Model& model, const gpt::GenerateOptions& options) {
  std::vector<uint32_t> ids;
  gpt::generate(model, {1, 2, 3}, options, [&](uint32_t id) {
    ids.push_back(id);
    return true;
  });
  return ids;
}

TEST(GenerateTest, IsAFunctionOfTheSeed) {
  Model model(kTiny, torch::kFloat32, 0);
  const auto with_seed = [&](uint64_t seed) {
    return generated(model, {.tokens = 40, .temperature = 1, .top_k = 0, .seed = seed});
  };
  EXPECT_EQ(with_seed(1), with_seed(1));
  EXPECT_NE(with_seed(1), with_seed(2));
}

TEST(GenerateTest, TemperatureZeroAndTopOneTakeTheLikeliest) {
  Model model(kTiny, torch::kFloat32, 0);
  const auto greedy = generated(model, {.tokens = 10, .temperature = 0, .top_k = 0, .seed = 1});
  EXPECT_EQ(generated(model, {.tokens = 10, .temperature = 2, .top_k = 1, .seed = 7}), greedy);
  const torch::NoGradGuard no_grad;
  gpt::KeyValueCache cache;
  EXPECT_EQ(
      greedy[0],
      model.next_logits(torch::tensor({{1, 2, 3}}, torch::kLong), cache).argmax().item<int64_t>());
}

TEST(GenerateTest, GoesOnBeyondTheContextAndStopsWhenTold) {
  Model model(kTiny, torch::kFloat32, 0);
  EXPECT_EQ(generated(model, {.tokens = 100}).size(), 100);
  int64_t count = 0;
  gpt::generate(model, {1}, {.tokens = 100}, [&](uint32_t) { return ++count < 7; });
  EXPECT_EQ(count, 7);
  EXPECT_ERROR_SAYS(
      gpt::generate(model, {}, {}, [](uint32_t) { return true; }), "at least one token");
}

}  // namespace
