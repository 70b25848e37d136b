// Eight lanes: two registers of NEON, which every 64-bit Arm processor has. Lanes, and the order in which they are
// summed, are those of simd_avx2.h, and so are the bits.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "moelight/half.h"

namespace moelight {
namespace {

struct Neon {
  struct V {
    float32x4_t low, high;
    friend V operator/(V x, V y) { return {vdivq_f32(x.low, y.low), vdivq_f32(x.high, y.high)}; }
  };
  static constexpr int64_t kWidth = 8;
  static constexpr int kHeadTile = 2;

  static V zero() { return set(0.0f); }
  static V set(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
  static V load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
  static void store(float* p, V x) { vst1q_f32(p, x.low), vst1q_f32(p + 4, x.high); }
  static V add(V x, V y) { return {vaddq_f32(x.low, y.low), vaddq_f32(x.high, y.high)}; }
  static V sub(V x, V y) { return {vsubq_f32(x.low, y.low), vsubq_f32(x.high, y.high)}; }
  static V mul(V x, V y) { return {vmulq_f32(x.low, y.low), vmulq_f32(x.high, y.high)}; }
  static V fma(V x, V y, V z) { return {vfmaq_f32(z.low, x.low, y.low), vfmaq_f32(z.high, x.high, y.high)}; }
  static V div(V x, V y) { return x / y; }
  // The second operand wins when either is not a number, as on x86.
  static V max(V x, V y) { return {larger(x.low, y.low), larger(x.high, y.high)}; }
  static V min(V x, V y) { return {smaller(x.low, y.low), smaller(x.high, y.high)}; }
  static V round(V x) { return {vrndnq_f32(x.low), vrndnq_f32(x.high)}; }
  static V scale(V x, V power) { return {scaled(x.low, power.low), scaled(x.high, power.high)}; }
  static float reduce_add(V x) {
    const float32x4_t four = vaddq_f32(x.low, x.high);
    return vpadds_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)));
  }
  static float reduce_max(V x) {
    const float32x4_t four = larger(x.low, x.high), two = larger(four, vextq_f32(four, four, 2));
    return vgetq_lane_f32(larger(two, vdupq_laneq_f32(two, 1)), 0);
  }
  static void sum4(V a, V b, V c, V d, float* out) {
    const float32x4_t low = vpaddq_f32(vpaddq_f32(a.low, b.low), vpaddq_f32(c.low, d.low));
    const float32x4_t high = vpaddq_f32(vpaddq_f32(a.high, b.high), vpaddq_f32(c.high, d.high));
    vst1q_f32(out, vaddq_f32(low, high));
  }

  static void load2(const float* p, V& a, V& b) { a = load(p), b = load(p + kWidth); }
  static void store2(float* p, V a, V b) { store(p, a), store(p + kWidth, b); }
  static void load2(const Fp16* p, V& a, V& b) { a = widened(halves(p)), b = widened(halves(p + kWidth)); }
  static void store2(Fp16* p, V a, V b) { narrow(p, a), narrow(p + kWidth, b); }
  static void load2(const int8_t* p, V& a, V& b) {
    const int8x16_t bytes = vld1q_s8(p);
    a = floats(vmovl_s8(vget_low_s8(bytes))), b = floats(vmovl_high_s8(bytes));
  }
  // A pair of bf16 is one 32-bit word: `a` takes the even elements, `b` the odd ones.
  static void load2(const Bf16* p, V& a, V& b) {
    const uint32x4_t low = words(p), high = words(p + kWidth);
    a = {even(low), even(high)}, b = {odd(low), odd(high)};
  }
  static void store2(Bf16* p, V a, V b) {
    vst1q_u16(&p->bits, joined(a.low, b.low)), vst1q_u16(&p[kWidth].bits, joined(a.high, b.high));
  }

  static void load2_in_order(const float* p, V& a, V& b) { load2(p, a, b); }
  static void load2_in_order(const Fp16* p, V& a, V& b) { load2(p, a, b); }
  static void load2_in_order(const Bf16* p, V& a, V& b) { a = in_order(p), b = in_order(p + kWidth); }
  // Of the numbers of a, then b, the even ones and the odd ones.
  static void unzip(V a, V b, V& even, V& odd) {
    even = {vuzp1q_f32(a.low, a.high), vuzp1q_f32(b.low, b.high)};
    odd = {vuzp2q_f32(a.low, a.high), vuzp2q_f32(b.low, b.high)};
  }
  static void zip(V even, V odd, V& a, V& b) {
    a = {vzip1q_f32(even.low, odd.low), vzip2q_f32(even.low, odd.low)};
    b = {vzip1q_f32(even.high, odd.high), vzip2q_f32(even.high, odd.high)};
  }

  template <class T>
  static void load2_part(const T* p, int64_t count, V& a, V& b) {
    T buffer[2 * kWidth] = {};
    for (int64_t i = 0; i < count; ++i) buffer[i] = p[i];
    load2(buffer, a, b);
  }
  template <class T>
  static void store2_part(T* p, int64_t count, V a, V b) {
    T buffer[2 * kWidth];
    store2(buffer, a, b);
    for (int64_t i = 0; i < count; ++i) p[i] = buffer[i];
  }

  // Of words that are pairs of bf16.
  static uint32x4_t words(const Bf16* p) { return vreinterpretq_u32_u16(vld1q_u16(&p->bits)); }
  static float32x4_t even(uint32x4_t words) { return vreinterpretq_f32_u32(vshlq_n_u32(words, 16)); }
  static float32x4_t odd(uint32x4_t words) { return vreinterpretq_f32_u32(vandq_u32(words, vdupq_n_u32(0xffff0000))); }

 private:
  static float32x4_t larger(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
  static float32x4_t smaller(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
  static float32x4_t scaled(float32x4_t x, float32x4_t power) {
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x), vshlq_n_s32(vcvtnq_s32_f32(power), 23)));
  }
  static float16x8_t halves(const Fp16* p) { return vreinterpretq_f16_u16(vld1q_u16(&p->bits)); }
  static V widened(float16x8_t x) { return {vcvt_f32_f16(vget_low_f16(x)), vcvt_high_f32_f16(x)}; }
  static void narrow(Fp16* p, V x) {
    vst1q_u16(&p->bits, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.low), x.high)));
  }
  static V floats(int16x8_t x) { return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(x))), vcvtq_f32_s32(vmovl_high_s16(x))}; }
  static V in_order(const Bf16* p) {
    const uint16x8_t eight = vld1q_u16(&p->bits), none = vdupq_n_u16(0);
    return {vreinterpretq_f32_u16(vzip1q_u16(none, eight)), vreinterpretq_f32_u16(vzip2q_u16(none, eight))};
  }
  // Rounded to nearest even at bit 16, which is the lower half of what is kept.
  static uint16x8_t joined(float32x4_t even, float32x4_t odd) {
    return vtrn2q_u16(vreinterpretq_u16_u32(rounded(even)), vreinterpretq_u16_u32(rounded(odd)));
  }
  static uint32x4_t rounded(float32x4_t x) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x), last = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t up = vaddq_u32(bits, vaddq_u32(last, vdupq_n_u32(0x7fff)));
    return vbslq_u32(vceqq_f32(x, x), up, vdupq_n_u32(0x7fc00000));
  }
};

}  // namespace
}  // namespace moelight
