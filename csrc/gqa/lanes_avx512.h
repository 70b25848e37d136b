// What attention asks of sixteen lanes beyond simd_avx512.h. Include only from a file compiled for AVX-512 F, BW, DQ,
// VL.
#pragma once

#include <type_traits>

#include "moelight/simd_avx512.h"

namespace moelight {
namespace {

struct LanesAvx512 : Avx512 {
  static constexpr int kScoredHeads = kHeadTile, kScoredRows = 1, kWeighedHeads = 2;
  static constexpr int kWeighedUnits = 4;  // of a row in a register tile of the values

  using Avx512::load2;
  using Avx512::load2_part;

  static V min(V x, V y) { return _mm512_min_ps(x, y); }
  static V div(V x, V y) { return _mm512_div_ps(x, y); }

  static void load2(const int8_t* p, V& a, V& b) {
    a = widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    b = widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + kWidth)));
  }
  static void load2_part(const int8_t* p, int64_t count, V& a, V& b) {
    const __m256i bytes = _mm256_maskz_loadu_epi8(static_cast<__mmask32>((uint64_t{1} << count) - 1), p);
    a = widen(_mm256_castsi256_si128(bytes)), b = widen(_mm256_extracti128_si256(bytes, 1));
  }

  // From the order in which load2 reads a T to that of memory, and back.
  template <class T>
  static void straighten(V& a, V& b) {
    if constexpr (std::is_same_v<T, Bf16>) {
      const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      pick(low, high, a, b);
    }
  }
  template <class T>
  static void bend(V& a, V& b) {
    if constexpr (std::is_same_v<T, Bf16>) {
      const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
      const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
      pick(even, odd, a, b);
    }
  }

 private:
  static V widen(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }
  static void pick(__m512i first, __m512i second, V& a, V& b) {
    const V x = _mm512_permutex2var_ps(a, first, b);
    b = _mm512_permutex2var_ps(a, second, b), a = x;
  }
};

}  // namespace
}  // namespace moelight
