#include <immintrin.h>

#include <algorithm>
#include <iterator>

#include "cells.h"

namespace moelight {
namespace {

constexpr int64_t kSide = 8;       // of a block of cells; two blocks below one another fill lines of the cache
constexpr int64_t kByteSide = 16;  // of a block of bytes; four do

inline __m256i load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline void store(void* to, __m256i value) { _mm256_storeu_si256(static_cast<__m256i*>(to), value); }

// Eight registers of eight words each, turned.
inline void turn_block(const __m256i (&a)[8], __m256i (&out)[8]) {
  __m256i b[8], c[8];
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]), b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    c[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]), c[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
    c[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]), c[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    out[i] = _mm256_permute2x128_si256(c[i], c[4 + i], 0x20);
    out[4 + i] = _mm256_permute2x128_si256(c[i], c[4 + i], 0x31);
  }
}

// Lines [i, i + 8 kBlocks) and columns [j, j + 8).
template <int kBlocks>
inline void turn_words_at(const char* from, int64_t lines, int64_t width, int64_t i, int64_t j, char* to) {
  for (int64_t block = 0; block < kBlocks; ++block, i += kSide) {
    __m256i a[8], out[8];
    for (int64_t k = 0; k < 8; ++k) a[k] = load(from + 4 * ((i + k) * width + j));
    turn_block(a, out);
    for (int64_t k = 0; k < 8; ++k) store(to + 4 * ((j + k) * lines + i), out[k]);
  }
}

void turn_words(const char* from, int64_t lines, int64_t width, char* to) {
  const int64_t full_width = width / kSide * kSide;
  int64_t i = 0;
  for (; i + 2 * kSide <= lines; i += 2 * kSide)
    for (int64_t j = 0; j < full_width; j += kSide) turn_words_at<2>(from, lines, width, i, j, to);
  for (; i + kSide <= lines; i += kSide)
    for (int64_t j = 0; j < full_width; j += kSide) turn_words_at<1>(from, lines, width, i, j, to);
  turn_singly<uint32_t>(from, lines, width, i, 0, full_width, to);
  turn_singly<uint32_t>(from, lines, width, 0, full_width, width, to);
}

void turn_halves(const char* from, int64_t lines, int64_t width, char* to) {
  const int64_t full_lines = lines / kSide * kSide, full_width = width / kSide * kSide;
  for (int64_t i = 0; i < full_lines; i += kSide) {
    for (int64_t j = 0; j < full_width; j += kSide) {
      __m128i a[8], b[8], c[8];
      for (int64_t k = 0; k < 8; ++k)
        a[k] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * ((i + k) * width + j)));
      for (int k = 0; k < 8; k += 2) {
        b[k] = _mm_unpacklo_epi16(a[k], a[k + 1]), b[k + 1] = _mm_unpackhi_epi16(a[k], a[k + 1]);
      }
      for (int k = 0; k < 8; k += 4) {
        c[k] = _mm_unpacklo_epi32(b[k], b[k + 2]), c[k + 1] = _mm_unpackhi_epi32(b[k], b[k + 2]);
        c[k + 2] = _mm_unpacklo_epi32(b[k + 1], b[k + 3]), c[k + 3] = _mm_unpackhi_epi32(b[k + 1], b[k + 3]);
      }
      for (int64_t k = 0; k < 4; ++k) {
        char* const line = to + 2 * ((j + 2 * k) * lines + i);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(line), _mm_unpacklo_epi64(c[k], c[4 + k]));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(line + 2 * lines), _mm_unpackhi_epi64(c[k], c[4 + k]));
      }
    }
  }
  turn_singly<uint16_t>(from, lines, width, 0, full_width, width, to);
  turn_singly<uint16_t>(from, lines, width, full_lines, 0, full_width, to);
}

// Lines [i, i + 16 kBlocks) and columns [j, j + 16). Of the eight bits that number a byte of a block, line before
// column, each round moves the first behind the others; four exchange line and column.
template <int kBlocks>
inline void turn_bytes_at(const char* from, int64_t lines, int64_t width, int64_t i, int64_t j, char* to) {
  for (int64_t block = 0; block < kBlocks; ++block, i += kByteSide) {
    __m128i a[kByteSide], b[kByteSide];
    for (int64_t k = 0; k < kByteSide; ++k)
      a[k] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + (i + k) * width + j));
    for (int round = 0; round < 4; ++round) {
      for (int k = 0; k < kByteSide / 2; ++k) {
        b[2 * k] = _mm_unpacklo_epi8(a[k], a[k + kByteSide / 2]);
        b[2 * k + 1] = _mm_unpackhi_epi8(a[k], a[k + kByteSide / 2]);
      }
      std::copy(std::begin(b), std::end(b), std::begin(a));
    }
    for (int64_t k = 0; k < kByteSide; ++k)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + (j + k) * lines + i), a[k]);
  }
}

void turn_bytes(const char* from, int64_t lines, int64_t width, char* to) {
  const int64_t full_width = width / kByteSide * kByteSide;
  int64_t i = 0;
  for (; i + 4 * kByteSide <= lines; i += 4 * kByteSide)
    for (int64_t j = 0; j < full_width; j += kByteSide) turn_bytes_at<4>(from, lines, width, i, j, to);
  for (; i + kByteSide <= lines; i += kByteSide)
    for (int64_t j = 0; j < full_width; j += kByteSide) turn_bytes_at<1>(from, lines, width, i, j, to);
  turn_singly<uint8_t>(from, lines, width, i, 0, full_width, to);
  turn_singly<uint8_t>(from, lines, width, 0, full_width, width, to);
}

// Of eight words, one of each column, the codes at each place: those of a row, column by column.
inline void turn_codes(const __m256i (&columns)[8], __m256i (&places)[8]) {
  const __m256i bytes = _mm256_set1_epi16(0xff), codes = _mm256_set1_epi8(0xf);
  __m256i a[8], b[8];
  for (int c = 0; c < 4; ++c) {
    a[c] = _mm256_blend_epi16(columns[c], _mm256_slli_epi32(columns[c + 4], 16), 0xaa);
    a[4 + c] = _mm256_blend_epi16(_mm256_srli_epi32(columns[c], 16), columns[c + 4], 0xaa);
  }
  for (int h = 0; h < 8; h += 4) {
    for (int c = h; c < h + 2; ++c) {
      b[c] = _mm256_or_si256(_mm256_and_si256(a[c], bytes), _mm256_slli_epi16(a[c + 2], 8));
      b[c + 2] = _mm256_or_si256(_mm256_srli_epi16(a[c], 8), _mm256_andnot_si256(bytes, a[c + 2]));
    }
  }
  for (int c = 0; c < 8; c += 2) {
    const __m256i low = _mm256_and_si256(b[c], codes), high = _mm256_andnot_si256(codes, b[c + 1]);
    places[c] = _mm256_or_si256(low, _mm256_slli_epi16(_mm256_and_si256(b[c + 1], codes), 4));
    places[c + 1] = _mm256_or_si256(_mm256_srli_epi16(_mm256_andnot_si256(codes, b[c]), 4), high);
  }
}

// Lines [i, i + 8 kBlocks) and the sixty-four rows of eight words: `turned` has, of each line, the rows of one place
// beside each other.
template <int kBlocks>
inline void turn_awq_at(const char* from, int64_t lines, int64_t words, int64_t i, int64_t word, char* to) {
  __m256i turned[8 * kBlocks][8];
  for (int64_t k = 0; k < 8 * kBlocks; ++k) {
    __m256i columns[8];
    for (int64_t c = 0; c < 8; ++c) columns[c] = load(from + 4 * ((8 * (i + k) + c) * words + word));
    turn_codes(columns, turned[k]);
  }
  for (int64_t p = 0; p < 8; ++p) {
    for (int block = 0; block < kBlocks; ++block) {
      __m256i a[8], out[8];
      for (int k = 0; k < 8; ++k) a[k] = turned[8 * block + k][kAwqPlaces[p]];
      turn_block(a, out);
      for (int64_t k = 0; k < 8; ++k) store(to + 4 * ((8 * (word + k) + p) * lines + i + 8 * block), out[k]);
    }
  }
}

void turn_awq(const char* from, int64_t lines, int64_t width, char* to) {
  const int64_t words = width / 8, full_width = words / kSide * kSide;
  int64_t i = 0;
  for (; i + 2 * kSide <= lines; i += 2 * kSide)
    for (int64_t word = 0; word < full_width; word += kSide) turn_awq_at<2>(from, lines, words, i, word, to);
  for (; i + kSide <= lines; i += kSide)
    for (int64_t word = 0; word < full_width; word += kSide) turn_awq_at<1>(from, lines, words, i, word, to);
  turn_awq_singly(from, lines, width, i, 0, 8 * full_width, to);
  turn_awq_singly(from, lines, width, 0, 8 * full_width, width, to);
}

}  // namespace

TurnLines turn_lines_avx2(Cells cells) {
  switch (cells) {
    case Cells::kBytes:
      return turn_bytes;
    case Cells::kHalves:
      return turn_halves;
    case Cells::kWords:
      return turn_words;
    default:
      return turn_awq;
  }
}

}  // namespace moelight
