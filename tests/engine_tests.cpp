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

// A table of CPUs, since this machine is only one of them.
TEST(EngineTest, TheRuleForEveryKindOfCpu) {
  using E = Engine;
  struct Case {
    CpuFeatures cpu;
    bool bf16;
    Engine for_bf16, for_fp32;
  };
  const std::vector<Case> cases = {
      {{}, false, E::kPortable, E::kPortable},
      {{.engines = {E::kPortable, E::kAvx2}}, false, E::kPortable, E::kAvx2},
      {{.engines = {E::kPortable, E::kAvx2, E::kAvx512}}, false, E::kPortable, E::kAvx512},
      {{.engines = {E::kPortable, E::kAvx2, E::kAvx512, E::kAvx512Bf16}},
       true,
       E::kAvx512Bf16,
       E::kAvx512Bf16},
      {{.engines = {E::kPortable, E::kAvx2, E::kAvx512, E::kAvx512Bf16}, .amx = true},
       true,
       E::kPortable,
       E::kAvx512Bf16},
      {{.engines = {E::kPortable, E::kNeon}}, false, E::kPortable, E::kNeon},
      {{.engines = {E::kPortable, E::kNeon}, .arm_bf16 = true}, true, E::kPortable, E::kNeon}};
  for (const auto& [cpu, bf16, for_bf16, for_fp32] : cases) {
    EXPECT_EQ(has_bf16(cpu), bf16) << to_string(cpu.engines.back());
    EXPECT_EQ(default_engine(cpu, kBFloat16), for_bf16) << to_string(cpu.engines.back());
    EXPECT_EQ(default_engine(cpu, kFloat), for_fp32) << to_string(cpu.engines.back());
    EXPECT_EQ(default_engine(cpu, torch::kDouble), E::kPortable);
  }
}

TEST(EngineTest, WhatIsForbiddenIsNotThere) {
  const char* asked = std::getenv("GROUP_MUON_CPU");
  if (asked == nullptr) return;
  EXPECT_FALSE(this_cpu().amx || this_cpu().arm_bf16);
  EXPECT_EQ(has_bf16(kCPU), std::string_view(asked) == "avx512_bf16");
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
  options.method = Method::kExact;  // always libtorch's
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
  EXPECT_ERROR_SAYS(resolved_engine(kBest, kCUDA, kFloat), "runs on the CPU, not on cuda");
  if (!computes_in(kBest, kBFloat16)) {
    EXPECT_ERROR_SAYS(
        resolved_engine(kBest, kCPU, kBFloat16),
        "does not compute in BFloat16; use engine auto or portable");
  }
}

TEST(EngineTest, ANamedEngineIsNeverReplacedByAnother) {
  if (kBest == Engine::kPortable) return;
  OrthogonalizeOptions options;
  options.method = Method::kGram;
  options.precision = torch::kDouble;
  EXPECT_EQ(resolved(options, kCPU).engine, Engine::kPortable);  // auto's choice
  options.engine = kBest;
  EXPECT_ERROR_SAYS(resolved(options, kCPU), "does not compute in Double");
}

TEST(EngineTest, TheCostOfBf16IsMeasuredOnce) {
  const std::string cost = bf16_cost();
  EXPECT_NE(cost.find("as long as in fp32"), std::string::npos);
  EXPECT_EQ(bf16_cost(), cost);
}

}  // namespace
}  // namespace group_muon
