// Compares all engines that run here on the shapes of GPT-2 Small and checks whether "auto" selects the fastest.
// Contenders take turns in one run. The best of the repeats counts, as a ratio to libtorch's.
//   engines [--layers 2] [--repeats 5] [--threads N] [--precision auto]

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "gpt/model.h"
#include "group_muon/optimizer.h"
#include "group_muon/products.h"

namespace {

using group_muon::Engine;
using group_muon::Product;
using torch::Tensor;

struct Contender {
  Engine engine;
  std::function<void()> work;
  double seconds = std::numeric_limits<double>::infinity();
};

void measure(std::vector<Contender>& contenders, int repeats) {
  for (int round = 0; round <= repeats; ++round) {
    for (auto& contender : contenders) {
      const auto start = std::chrono::steady_clock::now();
      contender.work();
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      if (round > 0) contender.seconds = std::min(contender.seconds, took.count());
    }
  }
}

// Prints a row of a table and returns whether the rule's engine is the fastest. Engines within 3% count as equal.
bool print_row(
    const std::string& name, std::vector<Contender> contenders, double flops, Engine rule,
    int repeats) {
  measure(contenders, repeats);
  const double portable = contenders.front().seconds;
  double best = portable, taken = portable;
  std::printf("| %s | %.1f", name.c_str(), portable * 1e3);
  if (flops > 0) std::printf(" (%.0f GF/s)", flops / portable / 1e9);
  for (const auto engine : group_muon::engines_here()) {
    if (engine == Engine::kPortable) continue;
    const auto found = std::find_if(
        contenders.begin(), contenders.end(), [&](const auto& c) { return c.engine == engine; });
    if (found == contenders.end()) {
      std::printf(" | –");
      continue;
    }
    std::printf(" | %.2f", portable / found->seconds);
    best = std::min(best, found->seconds);
    if (engine == rule) taken = found->seconds;
  }
  const bool right = taken <= 1.03 * best;
  std::printf(
      " | %s, %s |\n", std::string(to_string(rule)).c_str(), right ? "fastest" : "NOT the fastest");
  std::fflush(stdout);
  return right;
}

void print_head(const char* what) {
  std::printf("\n| %s | portable, ms", what);
  std::string line = "|---|---:";
  for (const auto engine : group_muon::engines_here()) {
    if (engine == Engine::kPortable) continue;
    std::printf(" | %s, times faster", std::string(to_string(engine)).c_str());
    line += "|---:";
  }
  std::printf(" | the rule |\n%s|---|\n", line.c_str());
}

std::vector<Engine> engines_for(torch::ScalarType precision) {
  std::vector<Engine> found;
  for (const auto engine : group_muon::engines_here()) {
    if (group_muon::computes_in(engine, precision)) found.push_back(engine);
  }
  return found;
}

template <typename T>
group_muon::MatrixView<T> view(const Tensor& tensor) {
  using Plain = std::remove_const_t<T>;
  return {tensor.data_ptr<Plain>(), tensor.size(0), tensor.size(1), tensor.stride(0)};
}

template <typename T>
bool products_table(int repeats) {
  constexpr auto kType = c10::CppTypeToScalarType<T>::value;
  const Engine rule = group_muon::default_engine(at::kCPU, kType);
  bool right = true;
  print_head("product");
  struct Shape {
    int64_t count, m, k, n;
    bool transpose_b, symmetric;
    const char* name;
  };
  for (const auto& shape : std::vector<Shape>{
           {1, 2048, 2048, 2048, false, false, "2048×2048 · 2048×2048"},
           {1, 768, 768, 768, false, false, "768×768 · 768×768"},
           {1, 768, 3072, 768, true, true, "XXᵀ, X 768×3072"},
           {1, 4096, 768, 3072, true, false, "4096×768 · 768×3072"},
           {144, 64, 768, 64, true, true, "144 × XXᵀ, X 64×768"},
           {144, 64, 64, 768, false, false, "144 × QX, X 64×768"}}) {
    const Tensor a = at::randn({shape.count, shape.m, shape.k}).to(kType);
    const Tensor b = shape.symmetric     ? a
                     : shape.transpose_b ? at::randn({shape.count, shape.n, shape.k}).to(kType)
                                         : at::randn({shape.count, shape.k, shape.n}).to(kType);
    Tensor out = at::empty({shape.count, shape.m, shape.n}, kType);
    std::vector<Contender> contenders;
    contenders.push_back({Engine::kPortable, [=]() mutable {
                            const Tensor right = shape.transpose_b ? b.mT() : b;
                            if (shape.count == 1) {
                              Tensor matrix = out[0];
                              at::mm_out(matrix, a[0], right[0]);
                            } else {
                              at::bmm_out(out, a, right);
                            }
                          }});
    for (const auto engine : engines_for(kType)) {
      if (engine == Engine::kPortable) continue;
      const auto product = [=](int64_t i) {
        return Product<T, T>{
            .a = view<const T>(a[i]),
            .b = view<const T>(b[i]),
            .out = view<T>(out[i]),
            .transpose_b = shape.transpose_b};
      };
      contenders.push_back({engine, [=] {
                              if (shape.count == 1) {
                                shape.symmetric
                                    ? group_muon::multiply_symmetric_shared(engine, product(0))
                                    : group_muon::multiply_shared(engine, product(0));
                                return;
                              }
                              at::parallel_for(0, shape.count, 1, [&](int64_t begin, int64_t end) {
                                for (int64_t i = begin; i < end; ++i) {
                                  shape.symmetric ? multiply_symmetric(engine, product(i))
                                                  : multiply(engine, product(i));
                                }
                              });
                            }});
    }
    const double flops =
        2.0 * static_cast<double>(shape.count * shape.m * shape.k) * static_cast<double>(shape.n);
    right &= print_row(shape.name, std::move(contenders), flops, rule, repeats);
  }
  return right;
}

// GPT-2 Small's block matrices, Q, K and V cut as in the paper's Table 1.
bool step_table(int64_t layers, torch::ScalarType precision, int repeats) {
  const Engine rule = group_muon::default_engine(at::kCPU, precision);
  const group_muon::AttentionShape qkv{.heads = 12, .head_dim = 64};
  const auto grouped = [&](const char* qk, const char* v) {
    return group_muon::packed_qkv(
        qkv, {group_muon::parse_schedule(qk), group_muon::parse_schedule(qk),
              group_muon::parse_schedule(v)});
  };
  bool right = true;
  print_head("optimizer step");
  for (const auto& [name, layout] : std::vector<std::pair<std::string, group_muon::Layout>>{
           {"packed", group_muon::plain()},
           {"three-way", grouped("all", "all")},
           {"QK g = 6 random", grouped("6:random", "all")},
           {"head-wise", grouped("1", "1")}}) {
    std::vector<Contender> contenders;
    for (const auto engine : engines_for(precision)) {
      std::vector<Tensor> attention, others;
      for (int64_t i = 0; i < layers; ++i) {
        attention.push_back(at::randn({2304, 768}));
        others.push_back(at::randn({768, 768}));
        others.push_back(at::randn({3072, 768}));
        others.push_back(at::randn({768, 3072}));
      }
      for (auto* list : {&attention, &others}) {
        for (auto& weight : *list) {
          weight.requires_grad_();
          weight.mutable_grad() = at::randn(weight.sizes());
        }
      }
      const auto options = group_muon::GroupMuonOptions()
                               .precision(std::string(group_muon::precision_name(precision)))
                               .engine(std::string(to_string(engine)));
      const auto group = [&](const std::vector<Tensor>& weights, const group_muon::Layout& of) {
        auto own = std::make_unique<group_muon::GroupMuonOptions>(options);
        own->layout(of);
        return torch::optim::OptimizerParamGroup(weights, std::move(own));
      };
      auto optimizer = std::make_shared<group_muon::GroupMuon>(
          std::vector{group(attention, layout), group(others, group_muon::plain())}, options);
      contenders.push_back({engine, [optimizer] { optimizer->step(); }});
    }
    right &= print_row(name, std::move(contenders), 0, rule, repeats);
  }
  return right;
}

bool training_table(torch::ScalarType precision, int repeats) {
  const Engine rule = group_muon::default_engine(at::kCPU, precision);
  bool right = true;
  print_head("loss and gradients");
  struct Case {
    const char* name;
    gpt::ModelShape shape;
    int64_t batch;
  };
  for (const auto& [name, shape, batch] : std::vector<Case>{
           {"4 layers × 192, 32 × 128 tokens",
            {.layers = 4,
             .heads = 12,
             .kv_heads = 0,
             .width = 192,
             .context = 128,
             .vocabulary = 4096},
            32},
           {"GPT-2 Small, 1 × 1024 tokens", {}, 1}}) {
    const Tensor rows = at::randint(
        shape.vocabulary, {batch, shape.context + 1}, at::detail::createCPUGenerator(1), at::kLong);
    std::vector<Contender> contenders;
    for (const auto engine : engines_for(precision)) {
      auto model = std::make_shared<gpt::Model>(shape, precision, /*seed=*/0);
      model->set_engine(engine);
      contenders.push_back({engine, [=, length = shape.context] {
                              model->add_gradients(
                                  rows.narrow(1, 0, length), rows.narrow(1, 1, length), 1);
                            }});
    }
    right &= print_row(name, std::move(contenders), 0, rule, repeats);
  }
  return right;
}

}  // namespace

int main(int argc, char** argv) {
  int64_t layers = 2;
  int repeats = 5, threads = static_cast<int>(std::thread::hardware_concurrency());
  std::string precision = "auto", tables = "products,step,training";
  CLI::App app(
      "Compare all engines on the shapes of GPT-2 Small; does \"auto\" select the fastest?");
  app.add_option("--layers", layers, "Number of layers for the optimizer step");
  app.add_option("--repeats", repeats, "Number of rounds that count");
  app.add_option("--threads", threads, "Number of threads");
  app.add_option("--precision", precision, "float32, bfloat16, or auto (what auto selects here)");
  app.add_option("--tables", tables, "Tables to print, out of products,step,training");
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(threads);
  auto type = group_muon::parse_precision(precision);
  if (type == group_muon::kAutoPrecision) {
    type = group_muon::default_precision(Engine::kAuto, at::kCPU);
  }
  if (type != at::kFloat && type != at::kBFloat16) {
    std::fprintf(stderr, "engines: --precision should be float32, bfloat16 or auto\n");
    return 2;
  }
  const auto wanted = [&](const char* table) { return tables.find(table) != std::string::npos; };
  std::printf(
      "%s, %d threads, %s\n", at::get_cpu_capability().c_str(), threads,
      std::string(group_muon::precision_name(type)).c_str());
  if (wanted("products")) {
    const bool fastest = type == at::kFloat ? products_table<float>(repeats)
                                            : products_table<c10::BFloat16>(repeats);
    if (!fastest) {
      std::printf(
          "\nSome single products are faster in libtorch; an engine is chosen as a whole.\n");
    }
  }
  bool right = true;
  if (wanted("step")) right &= step_table(layers, type, repeats);
  if (wanted("training")) right &= training_table(type, repeats);
  if (!wanted("step") && !wanted("training")) return 0;
  std::printf(
      "\nThe rule selected the fastest engine %s.\n",
      right ? "for every step above" : "NOT for every step above");
  return right ? 0 : 1;
}
