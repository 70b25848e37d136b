// Eight lanes of whole numbers. Include only from a file compiled for AVX2; internal linkage.
#pragma once

#include "integer_rows_avx2.h"
#include "moelight/simd_avx2.h"

namespace moelight {
namespace {

struct Avx2Integers {
  using Simd = Avx2;
  using V = __m256i;
  static constexpr int kVectors = 2, kTokens = 2;
  static V zero() { return _mm256_setzero_si256(); }
  static V add(V x, V y) { return _mm256_add_epi32(x, y); }
  static V load(const void* p) { return _mm256_load_si256(static_cast<const __m256i*>(p)); }
  static V spread(const void* p) {
    int32_t word;
    std::memcpy(&word, p, sizeof word);
    return _mm256_set1_epi32(word);
  }
  static V product(V x, V y) { return _mm256_mullo_epi32(x, y); }
  static V words(V sum, V x, V y) { return _mm256_add_epi32(sum, _mm256_madd_epi16(x, y)); }
  static V times(const int32_t* zeros, const void* minus) { return _mm256_mullo_epi32(load(zeros), spread(minus)); }
  // By words: the sum of two of these products fits no word.
  static V dot(V sum, V codes, V four) {
    const V even = _mm256_and_si256(codes, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(codes, 8);
    const V evens = _mm256_srai_epi16(_mm256_slli_epi16(four, 8), 8), odds = _mm256_srai_epi16(four, 8);
    return _mm256_add_epi32(sum, _mm256_add_epi32(_mm256_madd_epi16(even, evens), _mm256_madd_epi16(odd, odds)));
  }
  static __m256 floats(V sum) { return _mm256_cvtepi32_ps(sum); }
  static int32_t round(const float* from, int64_t size, float factor, bool pairs, int8_t* to) {
    if (size % 8 != 0 || factor == 0) return round_plainly(from, size, factor, pairs, to);
    const __m256 by = _mm256_set1_ps(factor);
    const __m128i order = pairs ? _mm_setr_epi8(0, 4, 8, 12, 2, 6, 10, 14, -1, -1, -1, -1, -1, -1, -1, -1)
                                : _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, -1, -1, -1, -1, -1, -1, -1, -1);
    V sum = zero();
    for (int64_t i = 0; i < size; i += 8) {
      const V eight = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(from + i), by));
      sum = _mm256_add_epi32(sum, eight);
      const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(to + i), _mm_shuffle_epi8(words, order));
    }
    alignas(32) int32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<V*>(lanes), sum);
    return lanes[0] + lanes[1] + lanes[2] + lanes[3] + lanes[4] + lanes[5] + lanes[6] + lanes[7];
  }
  static FillPanel filler(const Quantized& q) { return panel_filler<WidePanels>(q); }
  static constexpr StoredProducts kStored = stored_products;
  static constexpr int64_t kStoredBytes = 0;
};

}  // namespace
}  // namespace moelight
