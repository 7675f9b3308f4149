#pragma once
// Code for CPUs with AVX-512 and its bf16 dot products, in files that are compiled for any x86-64: what
// stands between BEGIN and END (after all includes) may run only where has_avx512_bf16().

#include <c10/util/BFloat16.h>

#include <cstdint>
#include <cstdlib>
#include <string_view>

#if defined(__x86_64__) && defined(__GNUC__)
#define GROUP_MUON_AVX512 1
// GCC 12 calls the undefined vectors inside its own intrinsics uninitialized.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#ifdef __clang__
#pragma GCC diagnostic pop
// clang-format off
#define GROUP_MUON_AVX512_BEGIN _Pragma("clang attribute push(__attribute__((target(\"avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma\"))), apply_to = function)")
// clang-format on
#define GROUP_MUON_AVX512_END _Pragma("clang attribute pop")
#else
// Up to the end of the file, where GCC instantiates templates.
#define GROUP_MUON_AVX512_BEGIN \
  _Pragma(                      \
      "GCC target(\"avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,prefer-vector-width=512\")")
#define GROUP_MUON_AVX512_END
#endif
#endif

namespace group_muon {

/// Whether this CPU has them. ATEN_CPU_CAPABILITY, by which torch's kernels are kept below AVX-512, keeps
/// ours too: so the way of other CPUs can be taken on any.
inline bool has_avx512_bf16() {
#ifdef GROUP_MUON_AVX512
  const char* wanted = std::getenv("ATEN_CPU_CAPABILITY");
  if (wanted != nullptr && std::string_view(wanted) != "avx512") return false;
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

#ifdef GROUP_MUON_AVX512
#define GROUP_MUON_AVX512_FUNCTION \
  [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")]] inline

/// A mask of the first `count` of 16 lanes.
inline __mmask16 first_lanes(int64_t count) {
  return static_cast<__mmask16>(
      count >= 16  ? 0xffff
      : count <= 0 ? 0
                   : (1U << static_cast<unsigned>(count)) - 1);
}

/// 16 bf16 or float numbers as float, and back; zeros where the mask has none.
GROUP_MUON_AVX512_FUNCTION __m512 load(__mmask16 lanes, const float* from) {
  return _mm512_maskz_loadu_ps(lanes, from);
}
GROUP_MUON_AVX512_FUNCTION __m512 load(__mmask16 lanes, const c10::BFloat16* from) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
GROUP_MUON_AVX512_FUNCTION void store(__mmask16 lanes, float* to, __m512 value) {
  _mm512_mask_storeu_ps(to, lanes, value);
}
GROUP_MUON_AVX512_FUNCTION void store(__mmask16 lanes, c10::BFloat16* to, __m512 value) {
  _mm256_mask_storeu_epi16(to, lanes, (__m256i)_mm512_cvtneps_pbh(value));
}
#endif

}  // namespace group_muon
