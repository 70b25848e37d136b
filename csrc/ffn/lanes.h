// float32 lanes over a SIMD type S (simd_*.h). Internal linkage: every instruction set has its own copy.
//
// Lanes are what the one algorithm (kernel.inl) is written over: an element type, kStep elements taken at a time, a
// multiply-add into float32 lanes, and a Converter for every type of weight that is not the element's own: it turns
// kConvertStep stored numbers into elements in their own order.
#pragma once

#include "ffn.h"

namespace moelight {
namespace {

constexpr int64_t kConvertStep = 32;

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
  static void convert(const W* from, float* to) {
    for (int64_t i = 0; i < kConvertStep; ++i) to[i] = to_float(from[i]);
  }
};

// By S::load2, which keeps the order of these numbers.
template <class S>
struct Converter<FloatLanes<S>, Fp16> {
  static void convert(const Fp16* from, float* to) {
    for (int64_t i = 0; i < kConvertStep; i += 2 * S::kWidth) {
      typename S::V a, b;
      S::load2(from + i, a, b);
      S::store(to + i, a);
      S::store(to + i + S::kWidth, b);
    }
  }
};

}  // namespace
}  // namespace moelight
