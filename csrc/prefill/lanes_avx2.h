// What prefill needs of eight lanes beyond simd_avx2.h.
#pragma once

#include "moelight/simd_avx2.h"

namespace moelight {
namespace {

struct PrefillAvx2 : Avx2 {
  static constexpr int kTileRows = 6, kTileVectors = 2;

  static V div(V x, V y) { return _mm256_div_ps(x, y); }

  // x in the lanes [begin, end), `other` beside them.
  static V keep(V x, int64_t begin, int64_t end, float other) {
    const V lane = _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7);
    const V above = _mm256_cmp_ps(lane, set(static_cast<float>(begin)), _CMP_GE_OQ);
    const V below = _mm256_cmp_ps(lane, set(static_cast<float>(end)), _CMP_LT_OQ);
    return _mm256_blendv_ps(set(other), x, _mm256_and_ps(above, below));
  }

  // to[column][row] = from[row][column], eight by eight.
  static void transpose(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
    V quad[2][4];  // quad[g][j], half h: column 4 h + j of rows 4 g to 4 g + 3
    for (int g = 0; g < 2; ++g, from += 4 * from_stride) {
      const V a = load(from), b = load(from + from_stride);
      const V c = load(from + 2 * from_stride), d = load(from + 3 * from_stride);
      const V ab_low = _mm256_unpacklo_ps(a, b), ab_high = _mm256_unpackhi_ps(a, b);
      const V cd_low = _mm256_unpacklo_ps(c, d), cd_high = _mm256_unpackhi_ps(c, d);
      quad[g][0] = _mm256_shuffle_ps(ab_low, cd_low, 0x44), quad[g][1] = _mm256_shuffle_ps(ab_low, cd_low, 0xee);
      quad[g][2] = _mm256_shuffle_ps(ab_high, cd_high, 0x44), quad[g][3] = _mm256_shuffle_ps(ab_high, cd_high, 0xee);
    }
    for (int j = 0; j < 4; ++j) {
      store(to + j * to_stride, _mm256_permute2f128_ps(quad[0][j], quad[1][j], 0x20));
      store(to + (j + 4) * to_stride, _mm256_permute2f128_ps(quad[0][j], quad[1][j], 0x31));
    }
  }
};

}  // namespace
}  // namespace moelight
