// What prefill needs of eight lanes beyond simd_neon.h.
#pragma once

#include "moelight/simd_neon.h"

namespace moelight {
namespace {

struct PrefillNeon : Neon {
  static constexpr int kTileRows = 6, kTileVectors = 2;

  // x in the lanes [begin, end), `other` beside them.
  static V keep(V x, int64_t begin, int64_t end, float other) {
    float lanes[kWidth];
    store(lanes, x);
    for (int64_t i = 0; i < kWidth; ++i) lanes[i] = i >= begin && i < end ? lanes[i] : other;
    return load(lanes);
  }

  // to[column][row] = from[row][column], eight by eight.
  static void transpose(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
    for (int64_t i = 0; i < kWidth; i += 4)
      for (int64_t j = 0; j < kWidth; j += 4)
        transpose4(from + i * from_stride + j, from_stride, to + j * to_stride + i, to_stride);
  }

 private:
  static void transpose4(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
    const float32x4_t a = vld1q_f32(from), b = vld1q_f32(from + from_stride);
    const float32x4_t c = vld1q_f32(from + 2 * from_stride), d = vld1q_f32(from + 3 * from_stride);
    const float32x4_t ac_low = vzip1q_f32(a, c), ac_high = vzip2q_f32(a, c);
    const float32x4_t bd_low = vzip1q_f32(b, d), bd_high = vzip2q_f32(b, d);
    vst1q_f32(to, vzip1q_f32(ac_low, bd_low)), vst1q_f32(to + to_stride, vzip2q_f32(ac_low, bd_low));
    vst1q_f32(to + 2 * to_stride, vzip1q_f32(ac_high, bd_high));
    vst1q_f32(to + 3 * to_stride, vzip2q_f32(ac_high, bd_high));
  }
};

}  // namespace
}  // namespace moelight
