#pragma once
// Engines: which code does a step's arithmetic. `portable` uses libtorch's operations, runs everywhere and is the
// reference for all others. The others are SIMD engines: our own kernels, compiled for one kind of CPU (targets.h).

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <string>
#include <string_view>
#include <vector>

namespace group_muon {

enum class Engine {
  kAuto,
  kPortable,
  kNeon,        // 64-bit Arm: fp32
  kAvx2,        // AVX2 and FMA: fp32
  kAvx512,      // AVX-512 without bf16 dot products: fp32
  kAvx512Bf16,  // AVX-512 with bf16 dot products: bf16 and fp32
};

/// Names: auto, portable, neon, avx2, avx512, avx512_bf16.
std::string_view to_string(Engine engine);
Engine parse_engine(std::string_view name);

/// The engines that run on this CPU, portable first and the best last. The environment variable GROUP_MUON_CPU
/// forbids every engine better than the one it names, which simulates a lesser CPU.
const std::vector<Engine>& engines_here();
bool runs_here(Engine engine);

/// Whether the engine computes in this precision. portable: all; the others: float32; avx512_bf16 also bfloat16.
bool computes_in(Engine engine, c10::ScalarType precision);

/// What the rule behind `auto` knows of a CPU.
struct CpuFeatures {
  std::vector<Engine> engines = {Engine::kPortable};  // portable first, the best last
  bool amx = false;       // multiplies bf16 tiles; used by libtorch's products only
  bool arm_bf16 = false;  // the same for Arm's BF16 instructions
};
const CpuFeatures& this_cpu();

/// The rule itself: whether bf16 products are in hardware, and the engine for a precision.
bool has_bf16(const CpuFeatures& cpu);
Engine default_engine(const CpuFeatures& cpu, c10::ScalarType precision);

/// Whether the device computes bf16 products in hardware: AVX512-BF16, AMX, Arm's BF16, or any accelerator.
bool has_bf16(const c10::Device& device);

/// bfloat16 if the device has it in hardware and the engine, if one is named, computes in it; else float32.
c10::ScalarType default_precision(Engine engine, const c10::Device& device);

/// How long libtorch's bf16 products take here, as text: "about 48 times as long as in fp32". Measured at the first
/// call, in less than a tenth of a second.
std::string bf16_cost();

/// The engine that `auto` chooses: the CPU's best if it computes in this precision, else portable. With AMX it is
/// portable for bf16, because libtorch's products use AMX and ours do not.
Engine default_engine(const c10::Device& device, c10::ScalarType precision);

/// Rejects an engine that does not run on this CPU or device.
void check_engine(Engine wanted, const c10::Device& device);

/// `wanted`, or the choice of `auto`. Rejects an engine that does not support this CPU, device or precision.
Engine resolved_engine(Engine wanted, const c10::Device& device, c10::ScalarType precision);

}  // namespace group_muon
