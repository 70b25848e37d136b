// Sixteen by sixteen words. Include only from a file compiled for AVX-512; internal linkage.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace moelight {
namespace {

// put(column, the words x[0..15][column]) for each of sixteen columns of 32-bit words.
template <class Put>
inline void columns16(const __m512i (&x)[16], Put&& put) {
  __m512i quad[4][4];  // quad[g][j], quarter h: column 4 h + j of rows 4 g to 4 g + 3
  for (int g = 0; g < 4; ++g) {
    const __m512i ab_low = _mm512_unpacklo_epi32(x[4 * g], x[4 * g + 1]);
    const __m512i ab_high = _mm512_unpackhi_epi32(x[4 * g], x[4 * g + 1]);
    const __m512i cd_low = _mm512_unpacklo_epi32(x[4 * g + 2], x[4 * g + 3]);
    const __m512i cd_high = _mm512_unpackhi_epi32(x[4 * g + 2], x[4 * g + 3]);
    quad[g][0] = _mm512_unpacklo_epi64(ab_low, cd_low), quad[g][1] = _mm512_unpackhi_epi64(ab_low, cd_low);
    quad[g][2] = _mm512_unpacklo_epi64(ab_high, cd_high), quad[g][3] = _mm512_unpackhi_epi64(ab_high, cd_high);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i a = _mm512_shuffle_i32x4(quad[0][j], quad[1][j], 0x44);
    const __m512i b = _mm512_shuffle_i32x4(quad[0][j], quad[1][j], 0xee);
    const __m512i c = _mm512_shuffle_i32x4(quad[2][j], quad[3][j], 0x44);
    const __m512i d = _mm512_shuffle_i32x4(quad[2][j], quad[3][j], 0xee);
    put(j, _mm512_shuffle_i32x4(a, c, 0x88));
    put(4 + j, _mm512_shuffle_i32x4(a, c, 0xdd));
    put(8 + j, _mm512_shuffle_i32x4(b, d, 0x88));
    put(12 + j, _mm512_shuffle_i32x4(b, d, 0xdd));
  }
}

// to[column][row] = the 32-bit words x[row][column], sixteen by sixteen.
inline void transpose16(const __m512i (&x)[16], float* to, int64_t to_stride) {
  columns16(x, [&](int64_t column, __m512i words) { _mm512_storeu_si512(to + column * to_stride, words); });
}

// to[column][line] = the 16-bit words from[line][column]: columns to_bytes and lines from_bytes apart. Pairs of lines
// are joined word by word, and blocks of sixteen such pairs transposed.
inline void turn16(const char* from, int64_t from_bytes, int64_t columns, int64_t lines, char* to, int64_t to_bytes) {
  for (int64_t line = 0; line < lines; line += 32) {
    for (int64_t i = 32; i < 64; ++i) {  // what is read next, or by the caller after this
      _mm_prefetch(from + (line + i) * from_bytes, _MM_HINT_T0);
      _mm_prefetch(from + (line + i) * from_bytes + 2 * (columns - 1), _MM_HINT_T0);
    }
    for (int64_t column = 0; column < columns; column += 16) {
      const auto some = static_cast<__mmask16>((uint32_t{1} << (columns - column < 16 ? columns - column : 16)) - 1);
      const auto load = [&](int64_t i) {
        const char* const at = from + (line + i) * from_bytes + 2 * column;
        return line + i < lines ? _mm256_maskz_loadu_epi16(some, at) : _mm256_setzero_si256();
      };
      __m512i pairs[16];
      for (int64_t i = 0; i < 16; ++i)
        pairs[i] = _mm512_or_si512(_mm512_cvtepu16_epi32(load(2 * i)),
                                   _mm512_slli_epi32(_mm512_cvtepu16_epi32(load(2 * i + 1)), 16));
      alignas(64) float turned[16][16];
      transpose16(pairs, turned[0], 16);
      const int64_t left = lines - line;
      const auto mask = left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
      for (int64_t c = 0; c < 16 && column + c < columns; ++c)
        _mm512_mask_storeu_epi16(to + (column + c) * to_bytes + 2 * line, mask, _mm512_load_si512(turned[c]));
    }
  }
}

}  // namespace
}  // namespace moelight
