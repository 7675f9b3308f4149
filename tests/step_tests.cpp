// Compares the step with the literal loop of reference.h, for every rule, g, layout and Nesterov setting.

#include <torch/torch.h>

#include <limits>

#include "group_muon/step.h"
#include "reference.h"
#include "testing.h"

namespace group_muon {
namespace {

using reference::Family;
using torch::Tensor;

constexpr int64_t kHeads = 12;
constexpr int64_t kSteps = 3;

// A layout as described to the library, and as families of rows for the reference, which works on `matrices`.
struct Case {
  std::string name;
  std::vector<int64_t> sizes;
  Layout layout;
  // Families at a step; `groups(heads, stream)` returns their groups.
  std::function<std::vector<Family>(std::function<std::vector<reference::Rows>(int64_t, int64_t)>)>
      families;
  // Views of the weight as matrices with heads along rows.
  std::function<std::vector<Tensor>(const Tensor&)> matrices = [](const Tensor& w) {
    return std::vector<Tensor>{w};
  };
  bool in_is_rows = false;  // whether rows of `matrices` are the "in" side
};

std::vector<Case> cases(const GroupingSchedule& grouping) {
  using reference::heads;
  const QkvGrouping all{grouping, grouping, grouping};
  const auto columns = [](const Tensor& w) { return std::vector<Tensor>{w.t()}; };
  return {
      {"separate",
       {24, 10},
       separate(12, 2, grouping),
       [](auto groups) { return std::vector<Family>{{heads(12, 2, 0, 2), groups(12, 0)}}; }},
      {"packed",
       {72, 10},
       packed_qkv({12, 2}, all),
       [](auto groups) {
         return std::vector<Family>{
             {heads(12, 2, 0, 2), groups(12, 0)},
             {heads(12, 2, 24, 2), groups(12, 1)},
             {heads(12, 2, 48, 2), groups(12, 2)}};
       }},
      {"packed, shared partition",
       {72, 10},
       packed_qkv({12, 2}, {grouping, grouping, grouping, true}),
       [](auto groups) {
         return std::vector<Family>{
             {heads(12, 2, 0, 2), groups(12, 0)},
             {heads(12, 2, 24, 2), groups(12, 0)},
             {heads(12, 2, 48, 2), groups(12, 2)}};
       }},
      {"grouped-query with own value dimension",
       {108, 16},
       packed_qkv({24, 2, 12, 3}, all),
       [](auto groups) {
         return std::vector<Family>{
             {heads(24, 2, 0, 2), groups(24, 0)},
             {heads(12, 2, 48, 2), groups(12, 1)},
             {heads(12, 3, 72, 3), groups(12, 2)}};
       }},
      {"multi-query",
       {28, 10},
       packed_qkv({12, 2, 1}, {grouping, {Grouping{}}, {Grouping{}}}),
       [](auto groups) {
         return std::vector<Family>{
             {heads(12, 2, 0, 2), groups(12, 0)},
             {heads(1, 2, 24, 2), {{0}}},
             {heads(1, 2, 26, 2), {{0}}}};
       }},
      {"interleaved",
       {72, 10},
       interleaved_qkv({12, 2}, all),
       [](auto groups) {
         return std::vector<Family>{
             {heads(12, 2, 0, 6), groups(12, 0)},
             {heads(12, 2, 2, 6), groups(12, 1)},
             {heads(12, 2, 4, 6), groups(12, 2)}};
       }},
      {"interleaved per KV group",
       {96, 10},
       interleaved_qkv({24, 2, 12}, all),
       [](auto groups) {
         std::vector<reference::Rows> q;  // [q, q, k, v] of 2 rows each, twelve times
         for (int64_t j = 0; j < 12; ++j) {
           for (const auto& rows : heads(2, 2, 8 * j, 2)) q.push_back(rows);
         }
         return std::vector<Family>{
             {q, groups(24, 0)},
             {heads(12, 2, 4, 8), groups(12, 1)},
             {heads(12, 2, 6, 8), groups(12, 2)}};
       }},
      {"MLA query",
       {60, 8},
       mla_query(12, 3, 2, grouping),
       [](auto groups) {
         return std::vector<Family>{
             {heads(12, 3, 0, 5), groups(12, 0)}, {heads(12, 2, 3, 5), groups(12, 1)}};
       }},
      {"MLA key-value",
       {84, 8},
       mla_key_value(12, 3, 4, grouping, grouping),
       [](auto groups) {
         return std::vector<Family>{
             {heads(12, 3, 0, 7), groups(12, 0)}, {heads(12, 4, 3, 7), groups(12, 2)}};
       }},
      {"output projection",
       {20, 24},
       output_projection(12, 2, grouping),
       [](auto groups) { return std::vector<Family>{{heads(12, 2, 0, 2), groups(12, 0)}}; },
       columns,
       true},
      {"transposed packed",
       {10, 72},
       transposed(packed_qkv({12, 2}, all)),
       [](auto groups) {
         return std::vector<Family>{
             {heads(12, 2, 0, 2), groups(12, 0)},
             {heads(12, 2, 24, 2), groups(12, 1)},
             {heads(12, 2, 48, 2), groups(12, 2)}};
       },
       columns},
      {"transposed output projection",
       {24, 20},
       transposed(output_projection(12, 2, grouping)),
       [](auto groups) { return std::vector<Family>{{heads(12, 2, 0, 2), groups(12, 0)}}; },
       [](const Tensor& w) { return std::vector<Tensor>{w}; },
       true},
      {"stacked experts",
       {3, 24, 10},
       stacked(separate(12, 2, grouping)),
       [](auto groups) { return std::vector<Family>{{heads(12, 2, 0, 2), groups(12, 0)}}; },
       [](const Tensor& w) { return w.unbind(0); }},
      {"plain",
       {24, 10},
       plain(),
       [](auto) { return std::vector<Family>{{heads(1, 24, 0, 24), {{0}}}}; }},
      {"convolution",
       {6, 4, 3, 3},
       convolution(),
       [](auto) { return std::vector<Family>{{heads(1, 6, 0, 6), {{0}}}}; },
       [](const Tensor& w) { return std::vector<Tensor>{w.view({6, 36})}; }},
  };
}

// √(out/in) distinguishes rows from columns, unlike the default scale.
double mup(int64_t out, int64_t in) {
  return std::sqrt(static_cast<double>(out) / static_cast<double>(in));
}

// With a Gram method, blocks of fp32 weights are orthogonalized in `precision`.
void expect_literal(
    const Case& c, const Grouping& grouping, bool nesterov, bool average, torch::ScalarType dtype,
    Method method = Method::kNewtonSchulz, torch::ScalarType precision = torch::kBFloat16,
    bool row_balance = false) {
  torch::manual_seed(1);
  const auto double_dtype = dtype == torch::kDouble;
  Tensor w = torch::randn(c.sizes, dtype);
  Tensor expected_w = w.clone();
  Tensor m = torch::zeros(c.sizes, dtype), expected_m = torch::zeros(c.sizes, dtype);
  StepOptions options;
  options.nesterov = nesterov;
  options.average = average;
  options.seed = 5;
  options.scale = {ScaleRule::kMup, ScaleRule::kMup, ScaleReference::kSegment};
  options.row_balance = row_balance;
  options.orthogonalize.method = method;
  options.orthogonalize.precision = is_gram(method) ? precision : dtype;
  if (is_gram(method)) options.orthogonalize.restarts = {3};
  reference::Settings settings{
      .nesterov = nesterov, .average = average, .weight_decay = 0.01, .precision = dtype};
  settings.scale = [&](int64_t rows, int64_t cols) {
    return c.in_is_rows ? mup(cols, rows) : mup(rows, cols);
  };
  if (row_balance) {
    settings.before =
        [&](const Tensor& block) {  // each output neuron, a row or a column, by its norm
          return block / block.norm(2, c.in_is_rows ? 0 : 1, true);
        };
  }
  for (int64_t step = 0; step < kSteps; ++step) {
    const Tensor g = torch::randn(c.sizes, dtype);
    const auto groups = [&](int64_t heads, int64_t stream) {
      const int64_t g_size = grouping.group_size == 0 ? heads : grouping.group_size;
      switch (grouping.rule) {
        case GroupingRule::kAdjacent:
          return reference::adjacent(heads, g_size);
        case GroupingRule::kInterval:
          return reference::interval(heads, g_size);
        case GroupingRule::kRandom:
          return reference::runs(
              random_permutation(heads, {5, step, parameter_key("w"), stream}), g_size);
        default:
          return reference::runs(grouping.order, g_size);
      }
    };
    const auto ws = c.matrices(expected_w), gs = c.matrices(g), ms = c.matrices(expected_m);
    for (size_t i = 0; i < ws.size(); ++i) {
      Tensor matrix_w = ws[i], matrix_m = ms[i];
      reference::step(matrix_w, gs[i], matrix_m, c.families(groups), settings);
    }
    group_muon::step(
        {{w, g, m, checked(c.layout, w.sizes(), "w"), "w", "w", step, 0.1, 0.01}}, options);
  }
  const auto error = [](const Tensor& a, const Tensor& b) {
    return ((a - b).norm() / b.norm()).item<double>();
  };
  const auto where =
      c.name + " " + to_string(GroupingSchedule{grouping}) + (nesterov ? " nesterov" : "");
  const bool in_bf16 = is_gram(method) && precision == torch::kBFloat16;
  EXPECT_LT(error(w, expected_w), in_bf16 ? 0.03 : double_dtype ? 1e-10 : 2e-5) << where;
  EXPECT_LT(error(m, expected_m), double_dtype ? 1e-10 : 2e-5) << where;
}

TEST(Step, EqualsTheLiteralAlgorithm) {
  for (const int64_t g : {1, 2, 3, 4, 6, 12}) {
    for (const auto rule :
         {GroupingRule::kAdjacent, GroupingRule::kInterval, GroupingRule::kRandom}) {
      const Grouping grouping{.group_size = g, .rule = rule};
      for (const auto& c : cases({grouping})) {
        for (const bool nesterov : {false, true}) {
          for (const auto dtype : {torch::kDouble, torch::kFloat}) {
            expect_literal(c, grouping, nesterov, /*average=*/false, dtype);
          }
        }
      }
    }
  }
}

TEST(Step, EqualsTheLiteralAlgorithmForAnOrderOfTheUsers) {
  const Grouping grouping{
      .group_size = 3,
      .rule = GroupingRule::kGiven,
      .order = {7, 2, 10, 0, 5, 9, 1, 4, 11, 3, 6, 8}};
  for (const auto& c : cases({grouping})) {
    bool fits = true;  // the order is for 12 heads
    for (const auto& segment : c.layout.segments)
      fits &= segment.num_heads() == kHeads || segment.num_heads() == 1;
    if (fits) expect_literal(c, grouping, true, false, torch::kDouble);
  }
}

TEST(Step, EqualsTheLiteralAlgorithmWithAveragedMomentum) {
  const Grouping grouping{.group_size = 4, .rule = GroupingRule::kRandom};
  for (const auto& c : cases({grouping})) {
    for (const bool nesterov : {false, true})
      expect_literal(c, grouping, nesterov, true, torch::kDouble);
  }
}

// Uses the precisions of the engine under test.
TEST(Step, EqualsTheLiteralAlgorithmWithGramMethods) {
  const Engine engine = engines_here().back();
  std::vector<torch::ScalarType> precisions = {torch::kFloat};
  if (computes_in(engine, torch::kBFloat16)) precisions.push_back(torch::kBFloat16);
  for (const int64_t g : {1, 4, 12}) {
    const Grouping grouping{.group_size = g, .rule = GroupingRule::kRandom};
    for (const auto& c : cases({grouping})) {
      for (const auto method : {Method::kGram, Method::kAccurateGram}) {
        for (const bool nesterov : {false, true}) {
          for (const bool average : {false, true}) {
            for (const auto precision : precisions) {
              expect_literal(c, grouping, nesterov, average, torch::kFloat, method, precision);
            }
          }
        }
      }
    }
  }
}

TEST(Step, WithBalancedRowsEqualsTheLiteralAlgorithm) {
  for (const int64_t g : {1, 4, 12}) {
    const Grouping grouping{.group_size = g, .rule = GroupingRule::kRandom};
    for (const auto& c : cases({grouping})) {
      expect_literal(
          c, grouping, true, false, torch::kDouble, Method::kNewtonSchulz, torch::kDouble, true);
      expect_literal(c, grouping, true, false, torch::kFloat, Method::kGram, torch::kFloat, true);
    }
  }
}

// What a schedule means at a step and a fraction of the learning rate, written out.
struct Meaning {
  int64_t g;
  bool random;
  double factor;
};
struct Scheduled {
  const char* text;
  std::function<Meaning(int64_t, double)> meaning;
};

TEST(Step, FactorsPeriodsAndSchedulesByLearningRateEqualTheLiteralAlgorithm) {
  const std::vector<Scheduled> schedules = {
      {"all*0.5", [](int64_t, double) { return Meaning{12, false, 0.5}; }},
      {"6:random*0.5", [](int64_t, double) { return Meaning{6, true, 0.5}; }},
      {"6:random*0.75~all*1.5/3",
       [](int64_t step, double) {
         return step == 0 || step == 3 || step == 6 ? Meaning{12, false, 1.5}
                                                    : Meaning{6, true, 0.75};
       }},
      {"1*2,4:random~2:random*0/2@3",
       [](int64_t step, double) {
         if (step < 3) return Meaning{1, false, 2};
         return step == 4 || step == 6 ? Meaning{2, true, 0} : Meaning{4, true, 1};
       }},
      {"1*3,6:random~all/2@0.5lr", [](int64_t step, double lr) {
         if (lr < 0.5) return Meaning{1, false, 3};
         return step % 2 == 0 ? Meaning{12, false, 1} : Meaning{6, true, 1};
       }}};
  const std::vector<double> fractions = {0.25, 0.5, 1, 1, 0.75, 0.5, 0.4, 0.1};
  for (const auto& [text, meaning] : schedules) {
    for (const bool in_place : {false, true}) {
      torch::manual_seed(6);
      const auto dtype = in_place ? torch::kFloat : torch::kDouble;
      const auto layout = checked(
          packed_qkv({12, 2}, {parse_schedule(text), parse_schedule(text), parse_schedule("1")}),
          {72, 10}, "w");
      StepOptions options;
      options.nesterov = false;
      options.seed = 5;
      options.orthogonalize.method = in_place ? Method::kGram : Method::kNewtonSchulz;
      options.orthogonalize.precision = dtype;
      const Tensor w = torch::randn({72, 10}, dtype), m = torch::zeros_like(w);
      Tensor expected = w.clone(), expected_m = m.clone();
      for (int64_t step = 0; step < static_cast<int64_t>(fractions.size()); ++step) {
        const Tensor g = torch::randn({72, 10}, dtype);
        const double fraction = fractions[step], lr = 0.1 * fraction;
        const auto [size, random, factor] = meaning(step, fraction);
        // Decay is not scaled by the factor, and V has none.
        expected.mul_(1 - lr * 0.2);
        for (int64_t stream = 0; stream < 3; ++stream) {
          const bool is_v = stream == 2;
          const auto order = random_permutation(12, {5, step, parameter_key("w"), stream});
          const auto groups = is_v     ? reference::adjacent(12, 1)
                              : random ? reference::runs(order, size)
                                       : reference::adjacent(12, size);
          const double own = is_v ? 1 : factor;
          reference::Settings settings{.lr = lr, .precision = dtype};
          settings.scale = [&](int64_t out, int64_t in) {
            return own * std::sqrt(static_cast<double>(std::max(out, in)));
          };
          reference::step(
              expected, g, expected_m, {{reference::heads(12, 2, 24 * stream, 2), groups}},
              settings);
        }
        group_muon::step({{w, g, m, layout, "w", "w", step, lr, 0.2, fraction}}, options);
      }
      EXPECT_LT(((w - expected).norm() / expected.norm()).item<double>(), in_place ? 2e-5 : 1e-10)
          << text << (in_place ? ", in place" : "");
    }
  }
}

double spectral_norm(const Tensor& matrix) {
  return torch::linalg_svdvals(matrix.to(torch::kDouble)).max().item<double>();
}

TEST(Step, MatchedSpectralNormsAreThoseOfTheLargestBlocks) {
  const Grouping grouping{.group_size = 3, .rule = GroupingRule::kRandom};
  const auto groups = [](int64_t heads, int64_t stream) {
    if (heads % 3 != 0) return reference::adjacent(heads, heads);
    return reference::runs(random_permutation(heads, {0, 0, parameter_key("w"), stream}), 3);
  };
  for (const auto& c : cases({grouping})) {
    for (const auto method : {Method::kNewtonSchulz, Method::kGram}) {
      torch::manual_seed(8);
      const Tensor grad = torch::randn(c.sizes);
      std::vector<Tensor> updates;
      for (const bool match : {false, true}) {
        StepOptions options;
        options.scale = {ScaleRule::kNaive, ScaleRule::kNaive, ScaleReference::kSegment};
        options.orthogonalize.method = method;
        options.orthogonalize.precision = torch::kFloat;
        options.match_spectral = match;
        const Tensor w = torch::zeros(c.sizes);
        const auto layout = checked(c.layout, w.sizes(), "w");
        group_muon::step({{w, grad, torch::zeros_like(w), layout, "w", "w", 0, 1, 0}}, options);
        updates.push_back(w);
      }
      const auto plain_step = c.matrices(updates[0]), matched = c.matrices(updates[1]);
      for (size_t i = 0; i < matched.size(); ++i) {
        for (const auto& family : c.families(groups)) {
          reference::Rows rows;
          double largest = 0;
          for (const auto& group : family.groups) {
            reference::Rows own;
            for (const auto head : group) {
              own.insert(own.end(), family.heads[head].begin(), family.heads[head].end());
            }
            largest = std::max(
                largest, spectral_norm(plain_step[i].index_select(0, reference::index(own))));
            rows.insert(rows.end(), own.begin(), own.end());
          }
          const Tensor before = plain_step[i].index_select(0, reference::index(rows));
          const Tensor after = matched[i].index_select(0, reference::index(rows));
          const double ratio = family.groups.size() == 1 ? 1 : largest / spectral_norm(before);
          EXPECT_LT(
              ((after - ratio * before).norm() / after.norm()).item<double>(),
              family.groups.size() == 1 ? 1e-5 : 0.03)
              << c.name;
        }
      }
    }
  }
}

// One step from zero with a Gram method, which uses one of our engines if there is one.
Tensor update_of(const Tensor& grad, const Layout& layout) {
  StepOptions options;
  options.orthogonalize.method = Method::kGram;
  options.orthogonalize.restarts = {3};
  const Tensor w = torch::zeros_like(grad);
  group_muon::step(
      {{w, grad, torch::zeros_like(grad), checked(layout, w.sizes(), "w"), "w", "w", 0, 1, 0}},
      options);
  return w;
}

TEST(Step, GradientsOfAnySizeGiveTheSameUpdate) {
  torch::manual_seed(3);
  const Tensor grad = torch::randn({24, 40});
  const auto layout = separate(4, 6, parse_schedule("2"));
  const Tensor expected = update_of(grad, layout);
  EXPECT_GT(expected.norm().item<double>(), 0.1);
  for (const double scale : {1e-35, 1e-30, 1e-15, 1e-11, 1e11, 1e15, 1e30}) {
    const Tensor update = update_of(grad * scale, layout);
    EXPECT_LT(((update - expected).norm() / expected.norm()).item<double>(), 0.03) << scale;
  }
}

TEST(Step, ZerosAndNansStayInTheirGroup) {
  torch::manual_seed(4);
  const Tensor grad = torch::randn({24, 40});
  const auto layout = separate(4, 6, parse_schedule("1"));
  const Tensor expected = update_of(grad, layout);
  for (const float poison :
       {0.0F, std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    Tensor other = grad.clone();
    if (poison == 0) {
      other.narrow(0, 6, 6).zero_();
    } else {
      other[8][3] = poison;
    }
    const Tensor update = update_of(other, layout);
    const Tensor touched = update.narrow(0, 6, 6);
    EXPECT_TRUE((poison == 0 ? touched == 0 : touched.isnan()).all().item<bool>()) << poison;
    EXPECT_TRUE(update.narrow(0, 0, 6).equal(expected.narrow(0, 0, 6)));
    EXPECT_TRUE(update.narrow(0, 12, 12).equal(expected.narrow(0, 12, 12)));
  }
}

TEST(Step, AutogradNoticesThatAWeightWasStepped) {
  Tensor w = torch::randn({6, 8}, torch::requires_grad());
  const Tensor loss = w.square().sum();  // keeps w for its gradient
  StepOptions options;
  options.orthogonalize.method = Method::kGram;
  group_muon::step(
      {{w, torch::randn({6, 8}), torch::zeros({6, 8}), plain(), "w", "w", 0, 1, 0}}, options);
  EXPECT_ERROR_SAYS(loss.backward(), "modified by an inplace operation");
}

// Steps several weights in one call, with default options except for fp64.
std::vector<Tensor> stepped(
    const std::vector<Tensor>& values, const std::vector<Tensor>& grads,
    const std::vector<Layout>& layouts, const std::vector<std::string>& names, int64_t steps = 2) {
  StepOptions options;
  options.orthogonalize.precision = torch::kDouble;
  std::vector<Tensor> result, momentum;
  for (const auto& value : values) {
    result.push_back(value.clone());
    momentum.push_back(torch::zeros_like(value));
  }
  for (int64_t step = 0; step < steps; ++step) {
    std::vector<Weight> weights;
    for (size_t i = 0; i < values.size(); ++i) {
      weights.push_back(
          {result[i], grads[i] * static_cast<double>(step + 1) + values[i], momentum[i],
           checked(layouts[i], values[i].sizes(), names[i]), names[i], names[i], step, 0.1, 0});
    }
    group_muon::step(weights, options);
  }
  return result;
}

bool close(const Tensor& a, const Tensor& b) { return torch::allclose(a, b, 1e-12, 1e-13); }

class StepIdentities : public testing::Test {
 protected:
  StepIdentities() { torch::manual_seed(2); }
  Tensor random(std::vector<int64_t> sizes) { return torch::randn(sizes, torch::kDouble); }
};

TEST_F(StepIdentities, OneGroupOfAllHeadsIsPlainMuon) {
  const Tensor w = random({24, 16}), g = random({24, 16});
  const auto plain_step = stepped({w}, {g}, {plain()}, {"w"})[0];
  for (const auto* rule : {"12", "12:interval", "12:random"}) {
    // Permuting rows before orthogonalization and back after it has no effect.
    EXPECT_TRUE(
        close(stepped({w}, {g}, {separate(12, 2, parse_schedule(rule))}, {"w"})[0], plain_step))
        << rule;
  }
}

TEST_F(StepIdentities, GroupsOfOneAreEachHeadOptimizedAlone) {
  const Tensor w = random({24, 16}), g = random({24, 16});
  const auto together = stepped({w}, {g}, {separate(12, 2, parse_schedule("1"))}, {"w"})[0];
  for (int64_t h = 0; h < 12; ++h) {
    const auto alone =
        stepped({w.narrow(0, 2 * h, 2)}, {g.narrow(0, 2 * h, 2)}, {plain()}, {"h"})[0];
    EXPECT_TRUE(close(together.narrow(0, 2 * h, 2), alone));
  }
  for (const auto* rule : {"1:interval", "1:random"}) {
    EXPECT_TRUE(
        close(stepped({w}, {g}, {separate(12, 2, parse_schedule(rule))}, {"w"})[0], together));
  }
}

TEST_F(StepIdentities, PackedIsItsSegmentsAsSeparateParameters) {
  const Tensor w = random({72, 16}), g = random({72, 16});
  const QkvGrouping grouping{
      parse_schedule("6:interval"), parse_schedule("2"), parse_schedule("all")};
  const auto packed = stepped({w}, {g}, {packed_qkv({12, 2}, grouping)}, {"w"})[0];
  const auto parts = stepped(
      w.split(24), g.split(24),
      {separate(12, 2, grouping.q), separate(12, 2, grouping.k), separate(12, 2, grouping.v)},
      {"q", "k", "v"});
  EXPECT_TRUE(close(packed, torch::cat(parts)));
}

TEST_F(StepIdentities, SteppingTogetherIsSteppingOneByOne) {
  const std::vector<Tensor> ws = {
      random({24, 16}), random({16, 24}), random({2, 12, 16}), random({24, 16}), random({24, 16})};
  std::vector<Tensor> gs;
  for (const auto& w : ws) gs.push_back(torch::randn_like(w));
  const std::vector<Layout> layouts = {
      plain(), plain(), plain(), separate(12, 2, parse_schedule("6:random")),
      separate(12, 2, parse_schedule("6:random"))};
  const std::vector<std::string> names = {"a", "b", "c", "d", "e"};
  const auto together = stepped(ws, gs, layouts, names);
  for (size_t i = 0; i < ws.size(); ++i) {
    EXPECT_TRUE(close(together[i], stepped({ws[i]}, {gs[i]}, {layouts[i]}, {names[i]})[0]))
        << names[i];
  }
}

TEST_F(StepIdentities, AStackThatIsSplitOverBucketsIsSteppedAlike) {
  // Larger than a bucket: 40 matrices of 512 × 512 are 1.25 · 2^23 elements.
  const Tensor w = torch::randn({40, 512, 512}), g = torch::randn({40, 512, 512});
  StepOptions options;
  Tensor whole = w.clone();
  group_muon::step({{whole, g, torch::zeros_like(w), plain(), "w", "w", 0, 0.1, 0}}, options);
  for (const int64_t i : {0, 31, 32, 39}) {
    Tensor one = w[i].clone();
    group_muon::step({{one, g[i], torch::zeros_like(one), plain(), "w", "w", 0, 0.1, 0}}, options);
    EXPECT_TRUE(torch::allclose(whole[i], one, 0, 0.02)) << i;
  }
}

TEST_F(StepIdentities, NonContiguousWeightsAreSteppedInPlace) {
  const Tensor w = random({24, 16}), g = random({24, 16});
  const auto expected = stepped({w}, {g}, {plain()}, {"w"})[0];
  StepOptions options;
  options.orthogonalize.precision = torch::kDouble;
  for (auto strided : {w.t().contiguous().t(), torch::cat({w, w}, 1).narrow(1, 0, 16)}) {
    const Tensor momentum = torch::zeros_like(strided);
    for (int64_t step = 0; step < 2; ++step) {
      group_muon::step(
          {{strided, g * static_cast<double>(step + 1) + w, momentum, plain(), "w", "w", step, 0.1,
            0}},
          options);
    }
    EXPECT_TRUE(close(strided, expected));
  }
  const Tensor conv = random({8, 4, 3, 3}), grad = random({8, 4, 3, 3});
  Tensor channels_last = conv.clone().contiguous(torch::MemoryFormat::ChannelsLast);
  ASSERT_FALSE(channels_last.is_contiguous());
  group_muon::step(
      {{channels_last, grad + conv, torch::zeros_like(channels_last), convolution(), "w", "w", 0,
        0.1, 0}},
      options);
  EXPECT_TRUE(close(channels_last, stepped({conv}, {grad}, {convolution()}, {"w"}, 1)[0]));
}

std::vector<Weight> weights_of(
    const std::vector<std::vector<int64_t>>& shapes, const Layout& layout) {
  std::vector<Weight> weights;
  for (const auto& shape : shapes) {
    const Tensor w = torch::zeros(shape);
    weights.push_back(
        {w, w, w, checked(layout, w.sizes(), "w"), c10::str("w", weights.size()), "w", 0, 0.1, 0});
  }
  return weights;
}

TEST(Plan, BlocksOfOneOrientedShapeShareABucketAcrossWeights) {
  auto weights = weights_of({{24, 96}, {96, 24}, {24, 96}}, plain());
  const auto grouped =
      weights_of({{96, 48}, {96, 48}}, separate(12, 8, parse_schedule("3:random")));
  weights.insert(weights.end(), grouped.begin(), grouped.end());
  const auto buckets = make_plan(weights, {}).buckets;
  ASSERT_EQ(buckets.size(), 2U);
  EXPECT_EQ(buckets[0].short_side, 24);
  EXPECT_EQ(buckets[0].long_side, 96);
  EXPECT_EQ(buckets[0].blocks, 3);
  EXPECT_TRUE(buckets[0].slots[1].transpose);
  EXPECT_EQ(buckets[1].short_side, 24);
  EXPECT_EQ(buckets[1].long_side, 48);
  EXPECT_EQ(buckets[1].blocks, 8);
}

TEST(Plan, Gpt2SmallNeedsFewBuckets) {
  // Three-way Q, K, V and the output projection: 48 blocks of 768×768. MLP: 24 of 768×3072.
  std::vector<Weight> weights;
  for (int layer = 0; layer < 12; ++layer) {
    for (auto& w : weights_of({{2304, 768}}, packed_qkv({12, 64}))) weights.push_back(w);
    for (auto& w : weights_of({{768, 768}, {3072, 768}, {768, 3072}}, plain()))
      weights.push_back(w);
  }
  const auto buckets = make_plan(weights, {}, int64_t{1} << 30).buckets;
  ASSERT_EQ(buckets.size(), 2U);
  EXPECT_EQ(buckets[0].blocks, 48);
  EXPECT_EQ(buckets[1].blocks, 24);
}

TEST(Plan, ABucketIsClosedBeforeItGrowsTooLarge) {
  const auto weights = weights_of({{8, 16}, {8, 16}, {8, 16}, {8, 16}, {8, 16}}, plain());
  const auto buckets = make_plan(weights, {}, 2 * 8 * 16).buckets;
  ASSERT_EQ(buckets.size(), 3U);
  EXPECT_EQ(buckets[0].blocks, 2);
  EXPECT_EQ(buckets[2].blocks, 1);
}

TEST(Plan, StackedMatricesAreSplitOverBuckets) {
  const auto weights = weights_of({{5, 8, 16}}, stacked(separate(4, 2, parse_schedule("2"))));
  const auto buckets = make_plan(weights, {}, 2 * 8 * 16).buckets;  // two matrices' worth
  ASSERT_EQ(buckets.size(), 3U);
  EXPECT_EQ(buckets[0].blocks, 4);
  EXPECT_EQ(buckets[1].slots[0].first_matrix, 2);
  EXPECT_EQ(buckets[2].blocks, 2);
}

TEST(Plan, TheScheduleDecidesAtEveryStep) {
  auto weights = weights_of({{24, 16}}, separate(12, 2, parse_schedule("1,6:random@3")));
  weights[0].step = 2;
  EXPECT_EQ(make_plan(weights, {}).buckets[0].blocks, 12);
  weights[0].step = 3;
  EXPECT_EQ(make_plan(weights, {}).buckets[0].blocks, 2);
}

}  // namespace
}  // namespace group_muon
