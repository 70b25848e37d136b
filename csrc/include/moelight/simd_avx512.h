// Sixteen lanes: AVX-512 F, BW, DQ and VL. Include only from a file compiled with those flags.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "moelight/half.h"

namespace moelight {
namespace {

struct Avx512 {
  using V = __m512;
  static constexpr int64_t kWidth = 16;
  static constexpr int kHeadTile = 4;

  static V zero() { return _mm512_setzero_ps(); }
  static V set(float x) { return _mm512_set1_ps(x); }
  static V load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, V x) { _mm512_storeu_ps(p, x); }
  static V add(V x, V y) { return _mm512_add_ps(x, y); }
  static V sub(V x, V y) { return _mm512_sub_ps(x, y); }
  static V mul(V x, V y) { return _mm512_mul_ps(x, y); }
  static V fma(V x, V y, V z) { return _mm512_fmadd_ps(x, y, z); }
  static V max(V x, V y) { return _mm512_max_ps(x, y); }
  static V round(V x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static V scale(V x, V power) { return _mm512_scalef_ps(x, power); }
  static float reduce_add(V x) { return _mm512_reduce_add_ps(x); }
  static float reduce_max(V x) { return _mm512_reduce_max_ps(x); }
  static void sum4(V a, V b, V c, V d, float* out) {
    const V ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const V cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const V abcd = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
  }

  static void load2(const float* p, V& a, V& b) { a = load(p), b = load(p + kWidth); }
  static void store2(float* p, V a, V b) { store(p, a), store(p + kWidth, b); }
  static void load2_part(const float* p, int64_t count, V& a, V& b) {
    const uint32_t mask = first(count);
    a = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), p);
    b = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), p + kWidth);
  }
  static void store2_part(float* p, int64_t count, V a, V b) {
    const uint32_t mask = first(count);
    _mm512_mask_storeu_ps(p, static_cast<__mmask16>(mask), a);
    _mm512_mask_storeu_ps(p + kWidth, static_cast<__mmask16>(mask >> 16), b);
  }

  static void load2(const Fp16* p, V& a, V& b) { widen(_mm512_loadu_si512(p), a, b); }
  static void store2(Fp16* p, V a, V b) { _mm512_storeu_si512(p, narrow(a, b)); }
  static void load2_part(const Fp16* p, int64_t count, V& a, V& b) {
    widen(_mm512_maskz_loadu_epi16(first(count), p), a, b);
  }
  static void store2_part(Fp16* p, int64_t count, V a, V b) { _mm512_mask_storeu_epi16(p, first(count), narrow(a, b)); }

  static void load2_in_order(const float* p, V& a, V& b) { load2(p, a, b); }
  static void load2_in_order(const Fp16* p, V& a, V& b) { load2(p, a, b); }
  static void load2_in_order(const Bf16* p, V& a, V& b) {
    const auto* halves = reinterpret_cast<const __m256i*>(p);
    a = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(halves)), 16));
    b = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(halves + 1)), 16));
  }
  static void store_in_order(Bf16* p, V a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded(a), 16)));
  }
  // Of the numbers of a, then b, the even ones and the odd ones.
  static void unzip(V a, V b, V& even, V& odd) {
    const __m512i first = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    even = _mm512_permutex2var_ps(a, first, b);
    odd = _mm512_permutex2var_ps(a, _mm512_add_epi32(first, _mm512_set1_epi32(1)), b);
  }

  static void load2(const int8_t* p, V& a, V& b) {
    const auto* bytes = reinterpret_cast<const __m128i*>(p);
    a = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes)));
    b = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes + 1)));
  }
  // A pair of bf16 is one 32-bit word: `a` takes the even elements, `b` the odd ones.
  static void load2(const Bf16* p, V& a, V& b) { split(_mm512_loadu_si512(p), a, b); }
  static void store2(Bf16* p, V a, V b) { _mm512_storeu_si512(p, join(a, b)); }
  static void load2_part(const Bf16* p, int64_t count, V& a, V& b) {
    split(_mm512_maskz_loadu_epi16(first(count), p), a, b);
  }
  static void store2_part(Bf16* p, int64_t count, V a, V b) { _mm512_mask_storeu_epi16(p, first(count), join(a, b)); }

 private:
  static __mmask32 first(int64_t count) { return static_cast<__mmask32>((uint64_t{1} << count) - 1); }
  static void widen(__m512i halves, V& a, V& b) {
    a = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    b = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
  }
  static __m512i narrow(V a, V b) {
    const __m256i low = _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), _mm512_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT), 1);
  }
  static void split(__m512i words, V& a, V& b) {
    a = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
    b = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
  }
  static __m512i join(V a, V b) {
    const __m512i high = _mm512_and_si512(rounded(b), _mm512_set1_epi32(static_cast<int>(0xffff0000)));
    return _mm512_or_si512(_mm512_srli_epi32(rounded(a), 16), high);
  }
  // Float bits rounded to nearest even at bit 16; the low half is left undefined.
  static __m512i rounded(V x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    return _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
  }
};

}  // namespace
}  // namespace moelight
