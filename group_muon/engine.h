#pragma once
// Engines: which code does a step's arithmetic. `portable` is libtorch's operations: it runs everywhere and is the
// reference for all others. Each of the others is our own kernels compiled for one kind of CPU (see targets.h).

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
  kAvx512Bf16,  // AVX-512 with them: bf16 and fp32
};

/// Names: auto, portable, neon, avx2, avx512, avx512_bf16.
std::string_view to_string(Engine engine);
Engine parse_engine(std::string_view name);

/// What this CPU can run, portable first and the best last. The environment variable GROUP_MUON_CPU forbids
/// everything better than the engine it names, so that a lesser CPU can be tried on a better one.
const std::vector<Engine>& engines_here();
bool runs_here(Engine engine);

/// Whether the engine computes in this precision. Portable has all; the others have float32, one has bfloat16 too.
bool computes_in(Engine engine, c10::ScalarType precision);

/// Whether bf16 products of the device are in hardware: AVX512-BF16, AMX, Arm's BF16, or any accelerator.
bool has_bf16(const c10::Device& device);

/// bfloat16 where the device has it in hardware (and the engine, if one is named), else float32.
c10::ScalarType default_precision(Engine engine, const c10::Device& device);

/// "48 times as long as in fp32": what libtorch's products in bf16 take here. Measured at the first call, in less than
/// a tenth of a second.
std::string bf16_cost();

/// The engine that `auto` takes for such weights: the CPU's best, if it computes in that precision. With AMX it is
/// portable in bf16, since libtorch's products use AMX and ours do not.
Engine default_engine(const c10::Device& device, c10::ScalarType precision);

/// Refuses an engine that this CPU or device does not have.
void check_engine(Engine wanted, const c10::Device& device);

/// `wanted`, or what auto comes to. Refuses an engine that this CPU, device or precision does not have.
Engine resolved_engine(Engine wanted, const c10::Device& device, c10::ScalarType precision);

}  // namespace group_muon
