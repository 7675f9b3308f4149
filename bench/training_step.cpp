// One contender of training_step.py: forward and backward of gpt::Model on random tokens.
// Reads one command per line and answers each with a line of JSON:
//   step    {"seconds", "loss"}: computes the gradients of one batch, starting from zero
//   profile {"part": seconds, …}: where the time of all steps went
//   norm    {"norm"}: norm of all gradients, to compare with another program's
//   memory  {"base_bytes", "peak_bytes"}: resident memory with the model alone, and the peak since

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <malloc.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <limits>
#include <string>

#include "gpt/model.h"
#include "gpt/profile.h"

namespace {

using torch::Tensor;

double step(gpt::Model& model, const Tensor& tokens, const Tensor& targets) {
  model.zero_grad();
  return model.add_gradients(tokens, targets, 1);
}

double gradient_norm(const gpt::Model& model) {
  double squares = 0;
  for (const Tensor& weight : model.parameters()) {
    squares += std::pow(weight.grad().norm().item<double>(), 2);
  }
  return std::sqrt(squares);
}

// `key` is VmRSS, the resident memory, or VmHWM, its peak.
size_t resident_bytes(const std::string& key) {
  std::ifstream file("/proc/self/status");
  std::string word;
  while (file >> word && word != key + ":") {
  }
  size_t kilobytes = 0;
  file >> kilobytes;
  return kilobytes * 1024;
}

}  // namespace

int main(int argc, char** argv) {
  // As in group-muon: keep freed memory instead of returning it to the system.
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
  gpt::ModelShape shape;
  int64_t batch = 1;
  int threads = 1;
  std::string engine = "auto";
  std::string precision = "bf16";
  CLI::App app("Forward and backward of the GPT, one step per line of input; see training_step.py");
  app.add_option("--layers", shape.layers);
  app.add_option("--heads", shape.heads);
  app.add_option("--width", shape.width);
  app.add_option("--context", shape.context);
  app.add_option("--vocabulary", shape.vocabulary);
  app.add_option("--batch", batch);
  app.add_option("--threads", threads);
  app.add_option("--engine", engine);
  app.add_option("--precision", precision)->check(CLI::IsMember({"bf16", "fp32"}));
  CLI11_PARSE(app, argc, argv);

  at::set_num_threads(threads);
  const auto type = precision == "bf16" ? at::kBFloat16 : at::kFloat;
  gpt::Model model(shape, type, /*seed=*/0);
  const Tensor rows = at::randint(
      shape.vocabulary, {batch, shape.context + 1}, at::detail::createCPUGenerator(1), at::kLong);
  const Tensor tokens = rows.narrow(1, 0, shape.context);
  const Tensor targets = rows.narrow(1, 1, shape.context);
  model.set_engine(group_muon::resolved_engine(group_muon::parse_engine(engine), at::kCPU, type));
  const size_t base = resident_bytes("VmRSS");

  for (std::string command; std::getline(std::cin, command);) {
    if (command == "step") {
      const auto start = std::chrono::steady_clock::now();
      const double loss = step(model, tokens, targets);
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      std::printf("{\"seconds\": %.6f, \"loss\": %.6f}\n", took.count(), loss);
    } else if (command == "profile") {
      std::string text;
      for (size_t i = 0; i < gpt::kPartNames.size(); ++i) {
        const double seconds = model.profile()[static_cast<gpt::Part>(i)];
        text += c10::str(text.empty() ? "" : ", ", "\"", gpt::kPartNames[i], "\": ", seconds);
      }
      std::printf("{%s}\n", text.c_str());
    } else if (command == "norm") {
      std::printf("{\"norm\": %.6f}\n", gradient_norm(model));
    } else if (command == "memory") {
      const size_t peak = resident_bytes("VmHWM");
      std::printf("{\"base_bytes\": %zu, \"peak_bytes\": %zu}\n", base, peak);
    } else {
      std::fprintf(stderr, "training_step: unknown command '%s'\n", command.c_str());
      return 2;
    }
    std::fflush(stdout);
  }
}
