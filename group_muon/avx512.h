#pragma once
// Code for CPUs with AVX-512 and its bf16 dot products, in files that are compiled for any x86-64: what
// stands between BEGIN and END (after all includes) may run only where has_avx512_bf16().

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

inline bool has_avx512_bf16() {
#ifdef GROUP_MUON_AVX512
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

}  // namespace group_muon
