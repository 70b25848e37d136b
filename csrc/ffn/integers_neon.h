// Eight lanes of whole numbers, as two registers of NEON. Internal linkage.
#pragma once

#include "integers.inl"
#include "moelight/simd_neon.h"
#include "quantized/panels_neon.h"

namespace moelight {
namespace {

struct NeonIntegers {
  using Simd = Neon;
  struct V {
    int32x4_t low, high;
  };
  static constexpr int kVectors = 2, kTokens = 2;
  static V zero() { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
  static V add(V x, V y) { return {vaddq_s32(x.low, y.low), vaddq_s32(x.high, y.high)}; }
  static V load(const void* p) {
    const auto* const from = static_cast<const int32_t*>(p);
    return {vld1q_s32(from), vld1q_s32(from + 4)};
  }
  static V spread(const void* p) {
    int32_t word;
    std::memcpy(&word, p, sizeof word);
    return {vdupq_n_s32(word), vdupq_n_s32(word)};
  }
  static V product(V x, V y) { return {vmulq_s32(x.low, y.low), vmulq_s32(x.high, y.high)}; }
  static V words(V sum, V x, V y) { return {words(sum.low, x.low, y.low), words(sum.high, x.high, y.high)}; }
  static V times(const int32_t* zeros, const void* minus) { return product(load(zeros), spread(minus)); }
  static V dot(V sum, V codes, V four) {
    return {dot(sum.low, codes.low, four.low), dot(sum.high, codes.high, four.high)};
  }
  static Neon::V floats(V sum) { return {vcvtq_f32_s32(sum.low), vcvtq_f32_s32(sum.high)}; }
  static int32_t round(const float* from, int64_t size, float factor, bool pairs, int8_t* to) {
    if (size % 8 != 0 || factor == 0) return round_plainly(from, size, factor, pairs, to);
    int32x4_t sum = vdupq_n_s32(0);
    for (int64_t i = 0; i < size; i += 8) {
      const Neon::V by = Neon::mul(Neon::load(from + i), Neon::set(factor));
      const int32x4_t low = vcvtnq_s32_f32(by.low), high = vcvtnq_s32_f32(by.high);
      sum = vaddq_s32(sum, vaddq_s32(low, high));
      const int16x8_t words = vcombine_s16(vmovn_s32(low), vmovn_s32(high));
      vst1_s8(to + i, vmovn_s16(pairs ? vuzp1q_s16(words, vextq_s16(words, words, 1)) : words));
    }
    return vaddvq_s32(sum);
  }
  static FillPanel filler(const Quantized& q) { return panel_filler<WidePanels>(q); }
  static constexpr StoredProducts kStored = nullptr;
  static constexpr int64_t kStoredBytes = 0;

 private:
  static int32x4_t words(int32x4_t sum, int32x4_t x, int32x4_t y) {
    const int16x8_t left = vreinterpretq_s16_s32(x), right = vreinterpretq_s16_s32(y);
    const int32x4_t low = vmull_s16(vget_low_s16(left), vget_low_s16(right)), high = vmull_high_s16(left, right);
    return vaddq_s32(sum, vpaddq_s32(low, high));
  }
  // By words: the sum of two of these products fits no word.
  static int32x4_t dot(int32x4_t sum, int32x4_t codes, int32x4_t four) {
    const uint8x16_t left = vreinterpretq_u8_s32(codes);
    const int8x16_t right = vreinterpretq_s8_s32(four);
    const int16x8_t low = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(left)));
    const int16x8_t high = vreinterpretq_s16_u16(vmovl_high_u8(left));
    const int16x8_t x_low = vmovl_s8(vget_low_s8(right)), x_high = vmovl_high_s8(right);
    const int32x4_t first = vpaddq_s32(vmull_s16(vget_low_s16(low), vget_low_s16(x_low)), vmull_high_s16(low, x_low));
    const int32x4_t second =
        vpaddq_s32(vmull_s16(vget_low_s16(high), vget_low_s16(x_high)), vmull_high_s16(high, x_high));
    return vaddq_s32(sum, vpaddq_s32(first, second));
  }
};

}  // namespace
}  // namespace moelight
