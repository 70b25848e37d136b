// Eight lanes: AVX2, FMA and F16C. Include only from a file compiled with those flags.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "moelight/half.h"

namespace moelight {
namespace {

struct Avx2 {
  using V = __m256;
  static constexpr int64_t kWidth = 8;
  static constexpr int kHeadTile = 2;

  static V zero() { return _mm256_setzero_ps(); }
  static V set(float x) { return _mm256_set1_ps(x); }
  static V load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, V x) { _mm256_storeu_ps(p, x); }
  static V add(V x, V y) { return _mm256_add_ps(x, y); }
  static V sub(V x, V y) { return _mm256_sub_ps(x, y); }
  static V mul(V x, V y) { return _mm256_mul_ps(x, y); }
  static V fma(V x, V y, V z) { return _mm256_fmadd_ps(x, y, z); }
  static V max(V x, V y) { return _mm256_max_ps(x, y); }
  static V round(V x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static V scale(V x, V power) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(power), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), exponent));
  }
  static float reduce_add(V x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
  }
  static float reduce_max(V x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
  }
  static void sum4(V a, V b, V c, V d, float* out) {
    const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
  }

  static void load2(const float* p, V& a, V& b) { a = load(p), b = load(p + kWidth); }
  static void store2(float* p, V a, V b) { store(p, a), store(p + kWidth, b); }
  static void load2(const Fp16* p, V& a, V& b) {
    const auto* halves = reinterpret_cast<const __m128i*>(p);
    a = _mm256_cvtph_ps(_mm_loadu_si128(halves)), b = _mm256_cvtph_ps(_mm_loadu_si128(halves + 1));
  }
  static void store2(Fp16* p, V a, V b) {
    auto* halves = reinterpret_cast<__m128i*>(p);
    _mm_storeu_si128(halves, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(halves + 1, _mm256_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT));
  }
  static void load2_in_order(const float* p, V& a, V& b) { load2(p, a, b); }
  static void load2_in_order(const Fp16* p, V& a, V& b) { load2(p, a, b); }
  static void load2_in_order(const Bf16* p, V& a, V& b) {
    const auto* halves = reinterpret_cast<const __m128i*>(p);
    a = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(halves)), 16));
    b = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(halves + 1)), 16));
  }
  // Of the numbers of a, then b, the even ones and the odd ones.
  static void unzip(V a, V b, V& even, V& odd) {
    const __m256i order = _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7);
    even = _mm256_permutevar8x32_ps(_mm256_shuffle_ps(a, b, 0x88), order);
    odd = _mm256_permutevar8x32_ps(_mm256_shuffle_ps(a, b, 0xdd), order);
  }

  static void load2(const int8_t* p, V& a, V& b) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    a = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
    b = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(bytes, bytes)));
  }
  // A pair of bf16 is one 32-bit word: `a` takes the even elements, `b` the odd ones.
  static void load2(const Bf16* p, V& a, V& b) { split(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), a, b); }
  static void store2(Bf16* p, V a, V b) {
    const __m256i low = _mm256_srli_epi32(rounded(a), 16);
    const __m256i high = _mm256_and_si256(rounded(b), _mm256_set1_epi32(static_cast<int>(0xffff0000)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_or_si256(low, high));
  }

  template <class T>
  static void load2_part(const T* p, int64_t count, V& a, V& b) {
    T buffer[2 * kWidth] = {};
    for (int64_t i = 0; i < count; ++i) buffer[i] = p[i];
    load2(buffer, a, b);
  }
  // Head sizes are multiples of eight, so a part of sixteen bf16 is exactly half of them.
  static void load2_part(const Bf16* p, int64_t, V& a, V& b) {
    split(_mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), a, b);
  }
  template <class T>
  static void store2_part(T* p, int64_t count, V a, V b) {
    T buffer[2 * kWidth];
    store2(buffer, a, b);
    for (int64_t i = 0; i < count; ++i) p[i] = buffer[i];
  }

 private:
  static void split(__m256i words, V& a, V& b) {
    a = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
    b = _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
  }
  // Float bits rounded to nearest even at bit 16; the low half is left undefined.
  static __m256i rounded(V x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    const __m256i quiet = _mm256_set1_epi32(0x7fc00000);
    return _mm256_blendv_epi8(up, quiet, _mm256_castps_si256(nan));
  }
};

}  // namespace
}  // namespace moelight
