#pragma once
// The kinds of CPUs that kernels are compiled for. A file whose name ends in _kernel.cpp is compiled once for each
// target, with that CPU's instructions allowed, into the namespace that GROUP_MUON_TARGET names (CMakeLists.txt,
// add_kernels). Such a file exports tables of functions and nothing else; which table is used is decided at run time.

#include "group_muon/engine.h"

#if defined(__x86_64__)
/// Calls X(namespace, engine) for each, the best last.
#define GROUP_MUON_FOR_TARGETS(X) \
  X(avx2, Engine::kAvx2)          \
  X(avx512, Engine::kAvx512)      \
  X(avx512_bf16, Engine::kAvx512Bf16)
#define GROUP_MUON_FOR_BF16_TARGETS(X) X(avx512_bf16, Engine::kAvx512Bf16)
#elif defined(__aarch64__)
#define GROUP_MUON_FOR_TARGETS(X) X(neon, Engine::kNeon)
#define GROUP_MUON_FOR_BF16_TARGETS(X)
#else
#define GROUP_MUON_FOR_TARGETS(X)
#define GROUP_MUON_FOR_BF16_TARGETS(X)
#endif
