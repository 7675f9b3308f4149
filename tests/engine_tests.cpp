#include <gtest/gtest.h>
#include <torch/torch.h>

#include "group_muon/iteration.h"
#include "testing.h"

namespace group_muon {
namespace {

using torch::kBFloat16;
using torch::kCPU;
using torch::kCUDA;
using torch::kFloat;

const Engine kBest = engines_here().back();

TEST(EngineTest, NamesComeBack) {
  for (const auto* name : {"auto", "portable", "neon", "avx2", "avx512", "avx512_bf16"}) {
    EXPECT_EQ(to_string(parse_engine(name)), name);
  }
  EXPECT_ERROR_SAYS(parse_engine("fast"), "use auto, portable, neon, avx2, avx512 or avx512_bf16");
}

TEST(EngineTest, PortableIsFirstAndTheBestIsWhatIsAskedFor) {
  EXPECT_EQ(engines_here().front(), Engine::kPortable);
  const char* asked = std::getenv("GROUP_MUON_CPU");
  if (asked != nullptr) {
    EXPECT_EQ(to_string(kBest), asked);
  }
}

TEST(EngineTest, PrecisionFollowsTheHardware) {
  EXPECT_EQ(default_precision(Engine::kAuto, kCUDA), kBFloat16);
  EXPECT_EQ(default_precision(Engine::kAvx2, kCPU), kFloat);
  EXPECT_EQ(default_precision(Engine::kAuto, kCPU), has_bf16(kCPU) ? kBFloat16 : kFloat);
  EXPECT_TRUE(has_bf16(kCPU) || !computes_in(kBest, kBFloat16) || kBest == Engine::kPortable);
}

TEST(EngineTest, AutoIsTheBestThatComputesInThePrecision) {
  EXPECT_EQ(default_engine(kCPU, kFloat), kBest);
  EXPECT_EQ(default_engine(kCUDA, kFloat), Engine::kPortable);
  EXPECT_EQ(default_engine(kCPU, torch::kDouble), Engine::kPortable);
  if (kBest == Engine::kAvx2) {
    EXPECT_EQ(default_engine(kCPU, kBFloat16), Engine::kPortable);
  }
}

TEST(EngineTest, OptionsAreResolvedOnce) {
  OrthogonalizeOptions options;
  options.method = Method::kAuto;
  const auto here = resolved(options, kCPU);
  EXPECT_EQ(here.precision, default_precision(Engine::kAuto, kCPU));
  EXPECT_EQ(here.engine, default_engine(kCPU, here.precision));
  EXPECT_EQ(here.method, here.engine == Engine::kPortable ? Method::kNewtonSchulz : Method::kGram);
  EXPECT_EQ(resolved(here, kCPU), here);
  options.method = Method::kExact;  // libtorch's on any engine
  EXPECT_EQ(resolved(options, kCPU).engine, Engine::kPortable);
  options.engine = runs_here(Engine::kNeon) ? Engine::kAvx2 : Engine::kNeon;
  EXPECT_ERROR_SAYS(resolved(options, kCPU), "does not run on this CPU");
}

TEST(EngineTest, WhatCannotBeIsRefused) {
  const auto elsewhere = runs_here(Engine::kNeon) ? Engine::kAvx2 : Engine::kNeon;
  EXPECT_ERROR_SAYS(
      resolved_engine(elsewhere, kCPU, kFloat),
      "does not run on this CPU; use auto or one of portable");
  if (kBest == Engine::kPortable) return;
  EXPECT_ERROR_SAYS(resolved_engine(kBest, kCUDA, kFloat), "is for the CPU, not for cuda");
  if (!computes_in(kBest, kBFloat16)) {
    EXPECT_ERROR_SAYS(resolved_engine(kBest, kCPU, kBFloat16), "computes in fp32 only");
  }
}

TEST(EngineTest, TheCostOfBf16IsMeasuredOnce) {
  const std::string cost = bf16_cost();
  EXPECT_NE(cost.find("as long as in fp32"), std::string::npos);
  EXPECT_EQ(bf16_cost(), cost);
}

}  // namespace
}  // namespace group_muon
