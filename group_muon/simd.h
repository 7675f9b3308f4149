#pragma once
// SIMD vectors of the CPU that a file is compiled for: torch's at::vec, which has one interface for all CPUs. For
// _kernel.cpp files only (targets.h). bf16 is supported only on targets with bf16 dot products. at::vec has none, so
// they are written in intrinsics.

#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>

#include <cstdint>
#include <cstring>

namespace group_muon::GROUP_MUON_TARGET {

using c10::BFloat16;
using Vec = at::vec::Vectorized<float>;
constexpr int64_t kLanes = Vec::size();

// Loads or stores the first `count` numbers, at most kLanes. Lanes that are not loaded are zero.
inline Vec load(const float* from, int64_t count) {
  if (count >= kLanes) return Vec::loadu(from);
  return count <= 0 ? Vec(0.0F) : Vec::loadu(from, count);
}
inline void store(float* to, int64_t count, const Vec& value) {
  if (count >= kLanes) {
    value.store(to);
  } else if (count > 0) {
    value.store(to, static_cast<int>(count));
  }
}

// Copies up to 32 bits from memory, unconverted, to every lane.
template <typename T>
inline Vec broadcast(const T* from, int64_t bytes = sizeof(float)) {
  float entry = 0;
  std::memcpy(&entry, from, bytes);
  return Vec(entry);
}

// Transposes kLanes × kLanes 32-bit numbers.
inline void transpose(Vec (&rows)[kLanes]) {
#pragma GCC unroll 4
  for (int64_t round = 1; round < kLanes; round *= 2) {
    Vec next[kLanes];
#pragma GCC unroll 8
    for (int64_t i = 0; i < kLanes / 2; ++i) {
      const auto [low, high] = at::vec::interleave2(rows[i], rows[i + kLanes / 2]);
      next[2 * i] = low;
      next[2 * i + 1] = high;
    }
#pragma GCC unroll 16
    for (int64_t i = 0; i < kLanes; ++i) rows[i] = next[i];
  }
}

#ifdef GROUP_MUON_TARGET_BF16

inline __mmask16 first_lanes(int64_t count) {
  return static_cast<__mmask16>(
      count >= 16  ? 0xffff
      : count <= 0 ? 0
                   : (1U << static_cast<unsigned>(count)) - 1);
}

inline Vec load(const BFloat16* from, int64_t count) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(count), from));
  return Vec(_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16)));
}
inline void store(BFloat16* to, int64_t count, const Vec& value) {
  _mm256_mask_storeu_epi16(
      to, first_lanes(count), (__m256i)_mm512_cvtneps_pbh(static_cast<__m512>(value)));
}

#endif

}  // namespace group_muon::GROUP_MUON_TARGET
