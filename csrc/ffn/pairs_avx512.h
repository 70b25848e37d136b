// Lanes that multiply pairs of bf16 and add into float32 (AVX512_BF16). Include only from a file compiled with that.
#pragma once

#include "ffn.h"
#include "lanes.h"
#include "moelight/simd_avx512.h"

namespace moelight {
namespace {

struct PairLanes {
  using Simd = Avx512;
  using Element = Bf16;
  using V = __m512;
  using Operand = __m512bh;
  static constexpr DType kElement = DType::kBFloat16;
  static constexpr int64_t kStep = 32;
  static constexpr bool kConvertsInRegisters = true;
  static constexpr int kTokens = 6;

  static Operand load(const Bf16* p) { return (Operand)_mm512_loadu_si512(p); }
  static V madd(V sum, Operand weight, Operand x) { return _mm512_dpbf16_ps(sum, weight, x); }
};

template <>
struct Converter<PairLanes, Bf16> {
  explicit Converter(float) {}
  void operator()(const Bf16* from, Bf16* to) const { _mm512_storeu_si512(to, _mm512_loadu_si512(from)); }
};

template <>
struct Converter<PairLanes, int8_t> {
  explicit Converter(float scale) : scale(_mm512_set1_ps(scale)) {}
  void operator()(const int8_t* from, Bf16* to) const { _mm512_storeu_si512(to, (__m512i)operand(from)); }
  __m512bh operand(const int8_t* from) const { return _mm512_cvtne2ps_pbh(floats(from + 16), floats(from)); }
  __m512 floats(const int8_t* from) const {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), scale);
  }
  __m512 scale;
};

// A table of the sixteen products of a group.
template <>
struct Converter<PairLanes, Int4> {
  explicit Converter(float scale) {
    const __m512 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    table = _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(values, _mm512_set1_ps(scale))));
  }
  // The look-up takes the low five bits of every 16: four of the number and one that the table, written twice, ignores.
  __m512bh operand(const Int4* from) const {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    const __m512i indices = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
    return (__m512bh)_mm512_permutexvar_epi16(indices, table);
  }
  void operator()(const Int4* from, Bf16* to) const { _mm512_storeu_si512(to, (__m512i)operand(from)); }
  __m512i table;
};

}  // namespace
}  // namespace moelight
