#include "group_muon/engine.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <utility>

#include "group_muon/targets.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace group_muon {
namespace {

constexpr std::array<std::pair<Engine, std::string_view>, 6> kNames = {
    {{Engine::kAuto, "auto"},
     {Engine::kPortable, "portable"},
     {Engine::kNeon, "neon"},
     {Engine::kAvx2, "avx2"},
     {Engine::kAvx512, "avx512"},
     {Engine::kAvx512Bf16, "avx512_bf16"}}};

#if defined(__x86_64__)
// Whether the CPU converts to and from half precision. Not every compiler's __builtin_cpu_supports() knows that.
bool cpu_has_f16c() {
  constexpr unsigned kF16c = 1U << 29;  // leaf 1, ECX
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & kF16c) != 0;
}
#endif

// Whether the CPU has the instructions of an engine.
bool cpu_has(Engine engine) {
  switch (engine) {
    case Engine::kPortable:
      return true;
#if defined(__x86_64__)
    case Engine::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && cpu_has_f16c();
    case Engine::kAvx512:
      return cpu_has(Engine::kAvx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512dq");
    case Engine::kAvx512Bf16:
      return cpu_has(Engine::kAvx512) && __builtin_cpu_supports("avx512bf16");
#elif defined(__aarch64__)
    case Engine::kNeon:
      return true;
#endif
    default:
      return false;
  }
}

// Whether the CPU multiplies tiles of bf16 (Intel's AMX).
bool cpu_has_amx() {
#if defined(__x86_64__)
  constexpr unsigned kAmxBf16 = 1U << 22, kAmxTile = 1U << 24;  // leaf 7, EDX
  constexpr unsigned kOsSavesState = 1U << 27;                  // leaf 1, ECX
  constexpr unsigned kTileState = 3U << 17;                     // state the OS must save
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & kOsSavesState) == 0) return false;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  if ((d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
  unsigned low = 0, high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & kTileState) == kTileState;
#else
  return false;
#endif
}

// Whether an Arm CPU multiplies bf16.
bool cpu_has_arm_bf16() {
#if defined(__aarch64__) && defined(__linux__)
  return (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0;
#else
  return false;
#endif
}

// The best engine that GROUP_MUON_CPU allows; kAuto: no limit.
Engine most_allowed() {
  const char* name = std::getenv("GROUP_MUON_CPU");
  if (name == nullptr || *name == 0) return Engine::kAuto;
  for (const auto& [engine, known] : kNames) {
    if (name == known && engine != Engine::kAuto) return engine;
  }
  TORCH_CHECK_VALUE(
      false,
      "group_muon: the environment variable GROUP_MUON_CPU should name an engine (portable, ",
      "neon, avx2, avx512, avx512_bf16), not '", name, "'");
}

std::string list(const std::vector<Engine>& engines) {
  std::string text;
  for (const auto engine : engines) {
    text.append(text.empty() ? "" : ", ").append(to_string(engine));
  }
  return text;
}

}  // namespace

std::string_view to_string(Engine engine) {
  return std::find_if(
             kNames.begin(), kNames.end(), [&](const auto& entry) { return entry.first == engine; })
      ->second;
}

Engine parse_engine(std::string_view name) {
  for (const auto& [engine, known] : kNames) {
    if (name == known) return engine;
  }
  TORCH_CHECK_VALUE(
      false, "group_muon: unknown engine '", name,
      "': use auto, portable, neon, avx2, avx512 or avx512_bf16");
}

const CpuFeatures& this_cpu() {
  static const CpuFeatures cpu = [] {
    const Engine most = most_allowed();
    const bool unrestricted = most == Engine::kAuto;
    CpuFeatures found;
    [[maybe_unused]] const auto add = [&](Engine engine) {
      if (cpu_has(engine) && (unrestricted || engine <= most)) found.engines.push_back(engine);
    };
#define GROUP_MUON_ADD(target, engine, ...) add(Engine::engine);
    GROUP_MUON_FOR_TARGETS(GROUP_MUON_ADD)
#undef GROUP_MUON_ADD
    found.amx = unrestricted && cpu_has_amx();
    found.arm_bf16 = unrestricted && cpu_has_arm_bf16();
    return found;
  }();
  return cpu;
}

const std::vector<Engine>& engines_here() { return this_cpu().engines; }

bool runs_here(Engine engine) {
  const auto& all = engines_here();
  return std::find(all.begin(), all.end(), engine) != all.end();
}

bool computes_in(Engine engine, c10::ScalarType precision) {
  if (engine == Engine::kPortable) return true;
  return precision == c10::kFloat || (precision == c10::kBFloat16 && engine == Engine::kAvx512Bf16);
}

bool has_bf16(const CpuFeatures& cpu) {
  const Engine best = cpu.engines.back();
  return cpu.amx || cpu.arm_bf16 ||
         (best != Engine::kPortable && computes_in(best, c10::kBFloat16));
}

bool has_bf16(const c10::Device& device) { return !device.is_cpu() || has_bf16(this_cpu()); }

c10::ScalarType default_precision(Engine engine, const c10::Device& device) {
  const bool engine_has = engine == Engine::kAuto || computes_in(engine, c10::kBFloat16);
  return engine_has && has_bf16(device) ? c10::kBFloat16 : c10::kFloat;
}

std::string bf16_cost() {
  static const std::string cost = [] {
    constexpr int64_t kSize = 192;
    const auto seconds = [](c10::ScalarType precision) {
      const at::Tensor a = at::ones({kSize, kSize}, precision);
      double best = std::numeric_limits<double>::infinity();
      for (int i = 0; i < 3; ++i) {
        const auto start = std::chrono::steady_clock::now();
        at::mm(a, a);
        const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
        best = std::min(best, passed.count());
      }
      return best;
    };
    const double times = seconds(c10::kBFloat16) / seconds(c10::kFloat);
    if (times < 1.5) return std::string("about as long as in fp32");
    return c10::str("about ", std::lround(times), " times as long as in fp32");
  }();
  return cost;
}

Engine default_engine(const CpuFeatures& cpu, c10::ScalarType precision) {
  const Engine best = cpu.engines.back();
  const bool libtorch_is_faster = precision == c10::kBFloat16 && cpu.amx;
  return computes_in(best, precision) && !libtorch_is_faster ? best : Engine::kPortable;
}

Engine default_engine(const c10::Device& device, c10::ScalarType precision) {
  return device.is_cpu() ? default_engine(this_cpu(), precision) : Engine::kPortable;
}

void check_engine(Engine wanted, const c10::Device& device) {
  if (wanted == Engine::kAuto || wanted == Engine::kPortable) return;
  TORCH_CHECK_VALUE(
      device.is_cpu(), "group_muon: engine ", to_string(wanted), " runs on the CPU, not on ",
      device, "; use auto or portable");
  TORCH_CHECK_VALUE(
      runs_here(wanted), "group_muon: engine ", to_string(wanted),
      " does not run on this CPU; use auto or one of ", list(engines_here()));
}

Engine resolved_engine(Engine wanted, const c10::Device& device, c10::ScalarType precision) {
  if (wanted == Engine::kAuto) return default_engine(device, precision);
  check_engine(wanted, device);
  TORCH_CHECK_VALUE(
      computes_in(wanted, precision), "group_muon: engine ", to_string(wanted),
      " does not compute in ", precision, "; use engine auto or portable, or precision float32");
  return wanted;
}

}  // namespace group_muon
