// Sixteen by sixteen words. Include only from a file compiled for AVX-512; internal linkage.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace moelight {
namespace {

// to[column][row] = the 32-bit words x[row][column], sixteen by sixteen.
inline void transpose16(const __m512i (&x)[16], float* to, int64_t to_stride) {
  __m512i quad[4][4];  // quad[g][j], quarter h: column 4 h + j of rows 4 g to 4 g + 3
  for (int g = 0; g < 4; ++g) {
    const __m512i ab_low = _mm512_unpacklo_epi32(x[4 * g], x[4 * g + 1]);
    const __m512i ab_high = _mm512_unpackhi_epi32(x[4 * g], x[4 * g + 1]);
    const __m512i cd_low = _mm512_unpacklo_epi32(x[4 * g + 2], x[4 * g + 3]);
    const __m512i cd_high = _mm512_unpackhi_epi32(x[4 * g + 2], x[4 * g + 3]);
    quad[g][0] = _mm512_unpacklo_epi64(ab_low, cd_low), quad[g][1] = _mm512_unpackhi_epi64(ab_low, cd_low);
    quad[g][2] = _mm512_unpacklo_epi64(ab_high, cd_high), quad[g][3] = _mm512_unpackhi_epi64(ab_high, cd_high);
  }
  for (int j = 0; j < 4; ++j, to += to_stride) {
    const __m512i a = _mm512_shuffle_i32x4(quad[0][j], quad[1][j], 0x44);
    const __m512i b = _mm512_shuffle_i32x4(quad[0][j], quad[1][j], 0xee);
    const __m512i c = _mm512_shuffle_i32x4(quad[2][j], quad[3][j], 0x44);
    const __m512i d = _mm512_shuffle_i32x4(quad[2][j], quad[3][j], 0xee);
    _mm512_storeu_si512(to, _mm512_shuffle_i32x4(a, c, 0x88));
    _mm512_storeu_si512(to + 4 * to_stride, _mm512_shuffle_i32x4(a, c, 0xdd));
    _mm512_storeu_si512(to + 8 * to_stride, _mm512_shuffle_i32x4(b, d, 0x88));
    _mm512_storeu_si512(to + 12 * to_stride, _mm512_shuffle_i32x4(b, d, 0xdd));
  }
}

}  // namespace
}  // namespace moelight
