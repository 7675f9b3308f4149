#pragma once
// The kinds of CPU that kernels are compiled for. A file whose name ends in _kernel.cpp is compiled once per target,
// with that CPU's instructions enabled, into the namespace GROUP_MUON_TARGET (CMakeLists.txt, add_kernels). It
// exports only tables of functions; the table to use is chosen at run time.

#if defined(__x86_64__)
/// Calls X(namespace, engine, …) for each target, the best last.
#define GROUP_MUON_FOR_TARGETS(X, ...) \
  X(avx2, kAvx2, __VA_ARGS__)          \
  X(avx512, kAvx512, __VA_ARGS__)      \
  X(avx512_bf16, kAvx512Bf16, __VA_ARGS__)
/// The same for the targets that compute in bf16.
#define GROUP_MUON_FOR_BF16_TARGETS(X, ...) X(avx512_bf16, kAvx512Bf16, __VA_ARGS__)
#elif defined(__aarch64__)
#define GROUP_MUON_FOR_TARGETS(X, ...) X(neon, kNeon, __VA_ARGS__)
#define GROUP_MUON_FOR_BF16_TARGETS(X, ...)
#else
#define GROUP_MUON_FOR_TARGETS(X, ...)
#define GROUP_MUON_FOR_BF16_TARGETS(X, ...)
#endif

/// Declares a target's table: GROUP_MUON_FOR_TARGETS(GROUP_MUON_DECLARE_TABLE, kName, Type<…>)
#define GROUP_MUON_DECLARE_TABLE(target, its_engine, name, ...) \
  namespace target {                                            \
  extern constinit const __VA_ARGS__ name;                      \
  }

/// Defines a function that returns an engine's table and rejects engines without one:
/// GROUP_MUON_DEFINE_LOOKUP(GROUP_MUON_FOR_TARGETS, kernels_of, kName, Type<…>)
#define GROUP_MUON_DEFINE_LOOKUP(for_targets, function, name, ...)                                \
  template <>                                                                                     \
  const __VA_ARGS__& function(::group_muon::Engine engine) {                                      \
    for_targets(GROUP_MUON_RETURN_TABLE, name);                                                   \
    TORCH_CHECK(false, "group_muon: engine ", ::group_muon::to_string(engine), " has no " #name); \
  }
#define GROUP_MUON_RETURN_TABLE(target, its_engine, name) \
  if (engine == ::group_muon::Engine::its_engine) return target::name;
