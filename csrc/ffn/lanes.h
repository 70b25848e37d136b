// float32 lanes over a SIMD type S (simd_*.h). Internal linkage: every instruction set has its own copy.
//
// Lanes are what the one algorithm (kernel.inl) is written over: an element type, kStep elements taken at a time, a
// multiply-add into float32 lanes, and a Converter for every type of weight that is not the element's own: it turns
// kGroupStep stored numbers, times their scale, into elements in their own order.
#pragma once

#if defined(__x86_64__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "ffn.h"

namespace moelight {
namespace {

template <class S>
struct FloatLanes {
  using Simd = S;
  using Element = float;
  using V = typename S::V;
  using Operand = typename S::V;
  static constexpr int64_t kStep = S::kWidth;
  static constexpr int kTokens = S::kWidth == 16 ? 6 : S::kWidth == 8 ? 3 : 2;

  static Operand load(const float* p) { return S::load(p); }
  static V madd(V sum, Operand weight, Operand x) { return S::fma(weight, x, sum); }
};

template <class L, class W>
struct Converter;

template <class S, class W>
struct Converter<FloatLanes<S>, W> {
  explicit Converter(float) {}
  void operator()(const W* from, float* to) const {
    for (int64_t i = 0; i < kGroupStep; ++i) to[i] = to_float(from[i]);
  }
};

// By S::load2, which keeps the order of these types.
template <class S, class T>
void scaled(const T* from, float scale, float* to) {
  const auto factor = S::set(scale);
  for (int64_t i = 0; i < kGroupStep; i += 2 * S::kWidth) {
    typename S::V a, b;
    S::load2(from + i, a, b);
    S::store(to + i, S::mul(a, factor));
    S::store(to + i + S::kWidth, S::mul(b, factor));
  }
}

template <class S>
struct Converter<FloatLanes<S>, Fp16> {
  explicit Converter(float) {}
  void operator()(const Fp16* from, float* to) const { scaled<S>(from, 1.0f, to); }
};

template <class S>
struct Converter<FloatLanes<S>, int8_t> {
  explicit Converter(float scale) : scale(scale) {}
  void operator()(const int8_t* from, float* to) const { scaled<S>(from, scale, to); }
  float scale;
};

// kGroupStep values, with what every processor of the architecture has.
inline void unpack(const Int4* from, int8_t* to) {
#if defined(__x86_64__)
  const __m128i two = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  const __m128i mask = _mm_set1_epi8(15), zero = _mm_set1_epi8(8);
  const __m128i low = _mm_sub_epi8(_mm_and_si128(two, mask), zero);
  const __m128i high = _mm_sub_epi8(_mm_and_si128(_mm_srli_epi16(two, 4), mask), zero);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_unpacklo_epi8(low, high));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16), _mm_unpackhi_epi8(low, high));
#elif defined(__aarch64__)
  const uint8x16_t two = vld1q_u8(reinterpret_cast<const uint8_t*>(from));
  const int8x16_t zero = vdupq_n_s8(8);
  const int8x16_t low = vsubq_s8(vreinterpretq_s8_u8(vandq_u8(two, vdupq_n_u8(15))), zero);
  const int8x16_t high = vsubq_s8(vreinterpretq_s8_u8(vshrq_n_u8(two, 4)), zero);
  vst1q_s8(to, vzip1q_s8(low, high)), vst1q_s8(to + 16, vzip2q_s8(low, high));
#else
  for (int64_t i = 0; i < kGroupStep / 2; ++i) {
    to[2 * i] = static_cast<int8_t>((from[i].two & 15) - 8);
    to[2 * i + 1] = static_cast<int8_t>((from[i].two >> 4) - 8);
  }
#endif
}

template <class S>
struct Converter<FloatLanes<S>, Int4> {
  explicit Converter(float scale) : scale(scale) {}
  void operator()(const Int4* from, float* to) const {
    int8_t values[kGroupStep];
    unpack(from, values);
    scaled<S>(values, scale, to);
  }
  float scale;
};

}  // namespace
}  // namespace moelight
