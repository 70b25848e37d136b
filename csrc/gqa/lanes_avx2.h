// What attention asks of eight lanes beyond simd_avx2.h. Include only from a file compiled for AVX2, FMA and F16C.
#pragma once

#include <type_traits>

#include "moelight/simd_avx2.h"

namespace moelight {
namespace {

struct LanesAvx2 : Avx2 {
  static constexpr int kScoredHeads = 4, kScoredRows = 2, kWeighedHeads = 4;
  static constexpr int kWeighedUnits = 1;  // of a row in a register tile of the values

  using Avx2::load2;
  using Avx2::load2_part;

  static V min(V x, V y) { return _mm256_min_ps(x, y); }
  static V div(V x, V y) { return _mm256_div_ps(x, y); }

  static void load2(const int8_t* p, V& a, V& b) { a = eight(p), b = eight(p + kWidth); }
  // Head sizes are multiples of eight, so a part of sixteen is exactly half of them.
  static void load2_part(const int8_t* p, int64_t, V& a, V& b) { a = eight(p), b = zero(); }

  // From the order in which load2 reads a T to that of memory, and back.
  template <class T>
  static void straighten(V& a, V& b) {
    if constexpr (std::is_same_v<T, Bf16>) {
      const V low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
      a = _mm256_permute2f128_ps(low, high, 0x20), b = _mm256_permute2f128_ps(low, high, 0x31);
    }
  }
  template <class T>
  static void bend(V& a, V& b) {
    if constexpr (std::is_same_v<T, Bf16>) {
      const V even = _mm256_shuffle_ps(a, b, 0x88), odd = _mm256_shuffle_ps(a, b, 0xdd);
      a = joined(even), b = joined(odd);
    }
  }

 private:
  static V eight(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  static V joined(V x) { return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xd8)); }
};

}  // namespace
}  // namespace moelight
