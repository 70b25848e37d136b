// Fills the panels of integers.h for AVX2, thirty-two columns of a row at once. Internal linkage.
#pragma once

#include "codes_avx2.h"
#include "integers.h"

namespace moelight {
namespace {

// Unsigned codes of columns [k, k + 32) as a panel takes them.
template <class Format>
inline __m256i panel_codes(const uint8_t* line, int64_t k) {
  __m256i codes = codes_of(Format(), line, k);
  if constexpr (kSignedBytes<Format>) codes = _mm256_xor_si256(codes, _mm256_set1_epi8(static_cast<char>(0x80)));
  if constexpr (kE2m1<Format>)
    codes = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(half_bytes_at(kE2m1Codes)), codes);
  if constexpr (Format::kPairs)
    codes = _mm256_shuffle_epi8(codes, _mm256_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15, 0, 2, 4,
                                                        6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
  return codes;
}

constexpr int64_t kSideRows = 8;  // that are read side by side

// Blocks of 32 columns with their scales.
template <class Format>
constexpr bool kBlocksOf32 = kInBlocks<Format> && Format::kTraits.block == 32;

template <class T>
inline T number_at(const void* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

// Scales of a block of each row, and what is taken off where the form has it.
struct SideLines {
  __m256 scale, least;
};
template <class Format>
inline SideLines side_lines(const uint8_t* const (&block)[kSideRows]) {
  const auto word = [&](int r) { return number_at<int32_t>(block[r]); };
  const auto half = [&](int r) { return number_at<int16_t>(block[r]); };
  if constexpr (Format::kLeast) {
    const __m256 a = _mm256_cvtph_ps(_mm_setr_epi32(word(0), word(1), word(4), word(5)));
    const __m256 b = _mm256_cvtph_ps(_mm_setr_epi32(word(2), word(3), word(6), word(7)));
    return {_mm256_shuffle_ps(a, b, 0x88), _mm256_xor_ps(_mm256_shuffle_ps(a, b, 0xdd), _mm256_set1_ps(-0.0f))};
  } else if constexpr (kE2m1<Format>) {
    float powers[kSideRows];
    for (int r = 0; r < kSideRows; ++r) powers[r] = Format::scale_in(block[r]);
    return {_mm256_loadu_ps(powers), _mm256_setzero_ps()};
  } else {
    const __m128i halves = _mm_setr_epi16(half(0), half(1), half(2), half(3), half(4), half(5), half(6), half(7));
    return {_mm256_cvtph_ps(halves), _mm256_setzero_ps()};
  }
}

// Thirty-two codes of each of eight rows, as vectors of words of one column after the other.
inline void put_words(const __m256i (&codes)[kSideRows], uint8_t* to) {
  const auto low = [](__m256i x, uint8_t* p) {
    _mm_store_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(x));
  };
  const auto high = [](__m256i x, uint8_t* p) {
    _mm_store_si128(reinterpret_cast<__m128i*>(p), _mm256_extracti128_si256(x, 1));
  };
#pragma GCC unroll 2
  for (int i = 0; i < kSideRows; i += 4, to += 16) {
    const __m256i a = _mm256_unpacklo_epi32(codes[i], codes[i + 1]), b = _mm256_unpackhi_epi32(codes[i], codes[i + 1]);
    const __m256i c = _mm256_unpacklo_epi32(codes[i + 2], codes[i + 3]),
                  d = _mm256_unpackhi_epi32(codes[i + 2], codes[i + 3]);
    const __m256i words[4] = {_mm256_unpacklo_epi64(a, c), _mm256_unpackhi_epi64(a, c), _mm256_unpacklo_epi64(b, d),
                              _mm256_unpackhi_epi64(b, d)};
#pragma GCC unroll 4
    for (int w = 0; w < 4; ++w) {
      low(words[w], to + 4 * kPanelRows * w), high(words[w], to + 4 * kPanelRows * (4 + w));
    }
  }
}

template <class Format>
struct WidePanels : PlainPanels<Format> {};

// Eight rows at a time, of which a last one stands for those that are missing.
template <class Format>
  requires kHasCodes<Format>
struct WidePanels<Format> {
  static void fill(const Quantized& q, const IntegerForm& form, int64_t row, int64_t rows, int64_t first, int64_t size,
                   Fetched& fetched, Panel& to) {
    const int64_t aligned = size / 32 * 32, step = 32 * q.row_bytes / q.columns;
    for (int64_t r = 0; r < rows; r += kSideRows) {
      const uint8_t* line[kSideRows];
      for (int64_t i = 0; i < kSideRows; ++i) line[i] = q.codes + (row + std::min(r + i, rows - 1)) * q.row_bytes;
      for (int64_t k = 0; k < aligned; k += 32) {
        __m256i codes[kSideRows];
#pragma GCC unroll 8
        for (int i = 0; i < kSideRows; ++i) {
          codes[i] = panel_codes<Format>(line[i], first + k);
          if (fetched.next != nullptr) _mm_prefetch(fetched.next, _MM_HINT_T1), fetched.next += step;
        }
        put_words(codes, to.codes + k * kPanelRows + 4 * r);
      }
      if constexpr (kBlocksOf32<Format>) put_lines(line, first, size, r, to);
    }
    for (int64_t r = 0; aligned < size && r < rows; ++r)
      plain_codes<Format>(q, form, row + r, first, aligned, size, r, to);
    if constexpr (!kBlocksOf32<Format>) plain_lines<Format>(q, form, row, rows, first, size, 0, to);
  }

 private:
  static void put_lines(const uint8_t* const (&line)[kSideRows], int64_t first, int64_t size, int64_t at, Panel& to) {
    constexpr int64_t kBytes = Format::kTraits.block_bytes;
    const uint8_t* block[kSideRows];
    for (int64_t i = 0; i < kSideRows; ++i) block[i] = line[i] + first / 32 * kBytes;
    for (int64_t g = 0; g < size / 32; ++g) {
      const SideLines by = side_lines<Format>(block);
      _mm256_store_ps(to.scales[g] + at, by.scale);
      if constexpr (Format::kLeast) _mm256_store_ps(to.least[g] + at, by.least);
      for (auto& next : block) next += kBytes;
    }
  }
};

}  // namespace
}  // namespace moelight
