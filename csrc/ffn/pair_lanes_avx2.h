// Pairs of bf16 in float32 lanes, and sums of their products, for AVX2. Internal linkage.
#pragma once

#include <immintrin.h>

namespace moelight {
namespace {

inline __m256 even_of(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline __m256 odd_of(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}
// In assembly, because gcc 12 loads the weight again for every token and keeps sums in memory.
inline __m256 madd(__m256 sum, __m256 weight, __m256 token) {
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(weight), "x"(token));
  return sum;
}

// sums[0..kRows) += what lies in the lanes of each, in one tree whatever kRows is.
template <int kRows>
inline void add_across(const __m256 (&sum)[kRows], float* sums) {
  float dots[8];
#pragma GCC unroll 2
  for (int i = 0; i < kRows; i += 4) {
    const auto row = [&](int r) { return sum[i + r < kRows ? i + r : i]; };
    const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(row(0), row(1)), _mm256_hadd_ps(row(2), row(3)));
    _mm_storeu_ps(dots + i, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) sums[r] += dots[r];
}

}  // namespace
}  // namespace moelight
