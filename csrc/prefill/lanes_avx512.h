// What prefill needs of sixteen lanes beyond simd_avx512.h.
#pragma once

#include "moelight/simd_avx512.h"
#include "moelight/transpose_avx512.h"

namespace moelight {
namespace {

struct PrefillAvx512 : Avx512 {
  static constexpr int kTileRows = 6, kTileVectors = 4;

  static V div(V x, V y) { return _mm512_div_ps(x, y); }

  // x in the lanes [begin, end), `other` beside them.
  static V keep(V x, int64_t begin, int64_t end, float other) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __mmask16 above = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(static_cast<int>(begin)));
    const __mmask16 inside = _mm512_mask_cmplt_epi32_mask(above, lane, _mm512_set1_epi32(static_cast<int>(end)));
    return _mm512_mask_mov_ps(set(other), inside, x);
  }

  static void transpose(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
    __m512i x[16];
    for (int i = 0; i < 16; ++i) x[i] = _mm512_loadu_si512(from + i * from_stride);
    transpose16(x, to, to_stride);
  }
};

}  // namespace
}  // namespace moelight
