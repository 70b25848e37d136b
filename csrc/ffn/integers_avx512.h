// Sixteen lanes of whole numbers. Include only from a file compiled for AVX-512; internal linkage.
#pragma once

#include "integers.inl"
#include "moelight/simd_avx512.h"
#include "quantized/panels_avx512.h"

namespace moelight {
namespace {

struct Avx512Integers {
  using Simd = Avx512;
  using V = __m512i;
  static constexpr int kVectors = 2, kTokens = 6;
  static V zero() { return _mm512_setzero_si512(); }
  static V add(V x, V y) { return _mm512_add_epi32(x, y); }
  static V load(const void* p) { return _mm512_load_si512(p); }
  static V spread(const void* p) {
    int32_t word;
    std::memcpy(&word, p, sizeof word);
    return _mm512_set1_epi32(word);
  }
  static V product(V x, V y) { return _mm512_mullo_epi32(x, y); }
  static V words(V sum, V x, V y) { return _mm512_add_epi32(sum, _mm512_madd_epi16(x, y)); }
  static V times(const int32_t* zeros, const void* minus) { return _mm512_mullo_epi32(load(zeros), spread(minus)); }
  // By words: the sum of two of these products fits no word.
  static V dot(V sum, V codes, V four) {
    const V even = _mm512_and_si512(codes, _mm512_set1_epi16(255)), odd = _mm512_srli_epi16(codes, 8);
    const V evens = _mm512_srai_epi16(_mm512_slli_epi16(four, 8), 8), odds = _mm512_srai_epi16(four, 8);
    return _mm512_add_epi32(sum, _mm512_add_epi32(_mm512_madd_epi16(even, evens), _mm512_madd_epi16(odd, odds)));
  }
  static __m512 floats(V sum) { return _mm512_cvtepi32_ps(sum); }
  static int32_t round(const float* from, int64_t size, float factor, bool pairs, int8_t* to) {
    if (size % 16 != 0 || factor == 0) return round_plainly(from, size, factor, pairs, to);
    const __m512 by = _mm512_set1_ps(factor);
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    V sum = zero();
    for (int64_t i = 0; i < size; i += 16) {
      const V sixteen = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(from + i), by));
      sum = _mm512_add_epi32(sum, sixteen);
      const __m128i bytes = _mm512_cvtepi32_epi8(sixteen);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), pairs ? _mm_shuffle_epi8(bytes, order) : bytes);
    }
    return _mm512_reduce_add_epi32(sum);
  }
  static FillPanel filler(const Quantized& q) { return panel_filler<WidePanels>(q); }
  static constexpr StoredProducts kStored = nullptr;
  static constexpr int64_t kStoredBytes = 0;
};

}  // namespace
}  // namespace moelight
