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

// Scales and zero points of eight rows, of which the last one stands for those that are missing.
struct RowScales {
  const Quantized& q;
  int64_t rows[kSideRows];
  const char* from[kSideRows];

  RowScales(const Quantized& q, int64_t row, int64_t rows_left) : q(q) {
    const int64_t bytes = q.scale_type == ScaleType::kFloat32 ? 4 : q.scale_type == ScaleType::kPower ? 1 : 2;
    for (int64_t r = 0; r < kSideRows; ++r) {
      rows[r] = row + std::min(r, rows_left - 1);
      from[r] = static_cast<const char*>(q.scales) + rows[r] * q.groups * bytes;
    }
  }
  int64_t group_of(int64_t k) const { return q.groups == 1 ? 0 : k / q.group; }
  template <class T>
  T at(int r, int64_t group) const {
    return number_at<T>(from[r] + group * static_cast<int64_t>(sizeof(T)));
  }
  __m256 scales(int64_t group) const {
    switch (q.scale_type) {
      case ScaleType::kFloat32: {
        const auto one = [&](int r) { return at<float>(r, group); };
        return _mm256_setr_ps(one(0), one(1), one(2), one(3), one(4), one(5), one(6), one(7));
      }
      case ScaleType::kPower: {
        const auto one = [&](int r) { return at<int8_t>(r, group); };
        const __m128i bytes =
            _mm_setr_epi8(one(0), one(1), one(2), one(3), one(4), one(5), one(6), one(7), 0, 0, 0, 0, 0, 0, 0, 0);
        return half_powers_of(_mm256_cvtepu8_epi32(bytes));
      }
      default: {
        const auto one = [&](int r) { return at<int16_t>(r, group); };
        const __m128i halves = _mm_setr_epi16(one(0), one(1), one(2), one(3), one(4), one(5), one(6), one(7));
        if (q.scale_type == ScaleType::kFloat16) return _mm256_cvtph_ps(halves);
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
      }
    }
  }
  template <class Format>
  __m256i zeros(int64_t k) const {
    int32_t zero[kSideRows];
    for (int r = 0; r < kSideRows; ++r) zero[r] = Format::integer_line(q, rows[r], k).zero;
    return bytes_at(reinterpret_cast<const uint8_t*>(zero));
  }
};

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

// Sixteen bytes of each of eight rows, as words of one place after the other.
inline void turn_words(const uint8_t* const (&from)[kSideRows], __m256i (&words)[4]) {
  __m256i rows[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) rows[i] = _mm256_set_m128i(half_bytes_at(from[i + 4]), half_bytes_at(from[i]));
  const __m256i a = _mm256_unpacklo_epi32(rows[0], rows[1]), b = _mm256_unpackhi_epi32(rows[0], rows[1]);
  const __m256i c = _mm256_unpacklo_epi32(rows[2], rows[3]), d = _mm256_unpackhi_epi32(rows[2], rows[3]);
  words[0] = _mm256_unpacklo_epi64(a, c), words[1] = _mm256_unpackhi_epi64(a, c);
  words[2] = _mm256_unpacklo_epi64(b, d), words[3] = _mm256_unpackhi_epi64(b, d);
}

// Blocks of 32 codes that end with sixteen bytes: the lower halves are those of the first sixteen codes.
template <class Format>
constexpr bool kFiveBitBlocks = std::is_same_v<Format, formats::Q5_0> || std::is_same_v<Format, formats::Q5_1>;
template <class Format>
constexpr bool kHalvedBlocks = kFiveBitBlocks<Format> || std::is_same_v<Format, formats::Q4_0> ||
                               std::is_same_v<Format, formats::Q4_1> || std::is_same_v<Format, formats::Mxfp4Blocks>;
// Rows of two codes in a byte, the earlier one in the low half, whose scales lie elsewhere. As tokens are ordered, four
// bytes are the even codes of eight, then the odd ones.
template <class Format>
constexpr bool kPairedRows = std::is_same_v<Format, formats::Packed<4>> || std::is_same_v<Format, formats::Mxfp4>;
// Bytes of thirty-two columns.
template <class Format>
constexpr int64_t kSideBytes = kPairedRows<Format> ? 16 : Format::kTraits.block_bytes;

// Fifth bits of four codes of each row out of thirty-two bits of it: of those from `quad` times four on.
inline __m256i fifth_bits_of(__m256i bits, int quad) {
  const __m128i rows = _mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c);
  const __m256i offsets =
      _mm256_add_epi8(_mm256_set1_epi8(static_cast<char>(quad / 2)), _mm256_broadcastsi128_si256(rows));
  const __m256i mask = _mm256_set1_epi32(quad % 2 == 0 ? 0x08040201 : static_cast<int>(0x80402010));
  const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(bits, offsets), mask), mask);
  return _mm256_and_si256(set, _mm256_set1_epi8(16));
}

// to(i, codes) of the four columns that meet numbers of a token from 4 i on, of eight rows, a word each, of the
// thirty-two columns `offset` bytes behind `line`.
template <class Format, class F>
inline __attribute__((always_inline)) void nibble_quads(const uint8_t* const (&line)[kSideRows], int64_t offset,
                                                        F&& to) {
  const uint8_t* from[kSideRows];
#pragma GCC unroll 8
  for (int i = 0; i < kSideRows; ++i) from[i] = line[i] + offset + kSideBytes<Format> - 16;
  __m256i words[4], bits;
  turn_words(from, words);
  if constexpr (kFiveBitBlocks<Format>) {
    const auto bits_at = [&](int i) { return static_cast<int>(word_at(from[i] - 4, 0)); };
    bits = _mm256_setr_epi32(bits_at(0), bits_at(1), bits_at(2), bits_at(3), bits_at(4), bits_at(5), bits_at(6),
                             bits_at(7));
  }
#pragma GCC unroll 8
  for (int quad = 0; quad < 8; ++quad) {
    const int word = kPairedRows<Format> ? quad / 2 : quad % 4;
    const bool lower = kPairedRows<Format> ? quad % 2 == 0 : quad < 4;
    __m256i codes = lower ? words[word] : _mm256_srli_epi16(words[word], 4);
    codes = _mm256_and_si256(codes, _mm256_set1_epi8(15));
    if constexpr (kFiveBitBlocks<Format>) codes = _mm256_or_si256(codes, fifth_bits_of(bits, quad));
    if constexpr (kE2m1<Format>)
      codes = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(half_bytes_at(kE2m1Codes)), codes);
    to(quad, codes);
  }
}

// Codes of columns [k, k + kPutColumns<Format>) of eight rows, to those of a panel.
template <class Format>
constexpr int64_t kPutColumns = std::is_same_v<Format, formats::Q4K> ? 64 : 32;
template <class Format>
inline void put_codes(const uint8_t* const (&line)[kSideRows], int64_t k, uint8_t* to) {
  constexpr int64_t kBytes = kSideBytes<Format>;
  const auto put = [&](int quad, __m256i codes) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(to + quad * 4 * kPanelRows), codes);
  };
  if constexpr (kHalvedBlocks<Format> || kPairedRows<Format>) {
    nibble_quads<Format>(line, k / 32 * kBytes, put);
  } else if constexpr (std::is_same_v<Format, formats::Q4K> || std::is_same_v<Format, formats::Q8_0>) {
    constexpr bool kHalves = std::is_same_v<Format, formats::Q4K>;
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const uint8_t* from[kSideRows];
      __m256i words[4];
#pragma GCC unroll 8
      for (int i = 0; i < kSideRows; ++i)
        from[i] = line[i] + 16 * half + (kHalves ? k / 256 * kBytes + 16 + k % 256 / 2 : k / 32 * kBytes + 2);
      turn_words(from, words);
#pragma GCC unroll 4
      for (int w = 0; w < 4; ++w) {
        if constexpr (kHalves) {
          put(4 * half + w, _mm256_and_si256(words[w], _mm256_set1_epi8(15)));
          put(4 * half + w + 8, _mm256_and_si256(_mm256_srli_epi16(words[w], 4), _mm256_set1_epi8(15)));
        } else {
          put(4 * half + w, _mm256_xor_si256(words[w], _mm256_set1_epi8(static_cast<char>(0x80))));
        }
      }
    }
  } else {
    __m256i codes[kSideRows];
#pragma GCC unroll 8
    for (int i = 0; i < kSideRows; ++i) codes[i] = panel_codes<Format>(line[i], k);
    put_words(codes, to);
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
    const int64_t aligned = size / 32 * 32, step = kSideRows * kPutColumns<Format> * q.row_bytes / q.columns;
    for (int64_t r = 0; r < rows; r += kSideRows) {
      const uint8_t* line[kSideRows];
      for (int64_t i = 0; i < kSideRows; ++i) line[i] = q.codes + (row + std::min(r + i, rows - 1)) * q.row_bytes;
      for (int64_t k = 0; k < aligned; k += kPutColumns<Format>) {
        put_codes<Format>(line, first + k, to.codes + k * kPanelRows + 4 * r);
        if (fetched.next == nullptr) continue;
        for (const char* const end = fetched.next + step; fetched.next < end; fetched.next += 64)
          _mm_prefetch(fetched.next, _MM_HINT_T1);
      }
      if constexpr (kBlocksOf32<Format>) put_lines(line, first, size, r, to);
      if constexpr (kParted<Format>) put_parts(line, first, size, r, to);
      if constexpr (kPairedRows<Format>) put_scales(RowScales(q, row + r, rows - r), form, first, size, r, to);
    }
    for (int64_t r = 0; aligned < size && r < rows; ++r)
      plain_codes<Format>(q, form, row + r, first, aligned, size, r, to);
    if constexpr (!kBlocksOf32<Format> && !kParted<Format> && !kPairedRows<Format>)
      plain_lines<Format>(q, form, row, rows, first, size, 0, to);
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

  static void put_scales(const RowScales& by, const IntegerForm& form, int64_t first, int64_t size, int64_t at,
                         Panel& to) {
    for (int64_t k = 0, g = 0; k < size; k += form.group, ++g) {
      _mm256_store_ps(to.scales[g] + at, by.scales(by.group_of(first + k)));
      if (form.zero < 0)
        _mm256_store_si256(reinterpret_cast<__m256i*>(to.zeros[g] + at), by.template zeros<Format>(first + k));
    }
  }

  static void put_parts(const uint8_t* const (&line)[kSideRows], int64_t first, int64_t size, int64_t at, Panel& to) {
    constexpr int64_t kBytes = Format::kTraits.block_bytes, kParts = Format::kLeast ? 8 : 16;
    for (int64_t g = 0; g < size / 256; ++g) {
      __m128i rows[kSideRows];
      for (int64_t i = 0; i < kSideRows; ++i) {
        const uint8_t* const block = line[i] + (first / 256 + g) * kBytes;
        if constexpr (Format::kLeast) {
          rows[i] = steps_and_lows(block);
          to.scales[g][at + i] = fast_half_at(block), to.least[g][at + i] = fast_half_at(block + 2);
        } else {
          rows[i] = part_steps(Format(), block), to.scales[g][at + i] = scale_of_parts(Format(), block);
        }
      }
      __m128i pairs[8];  // of neighbouring bytes of all rows
      turn_bytes(rows, pairs);
      for (int64_t p = 0; p < kParts; p += 2) {
        const __m128i two = pairs[p / 2];
        _mm256_store_si256(reinterpret_cast<__m256i*>(to.steps[kParts * g + p] + at), _mm256_cvtepi8_epi32(two));
        _mm256_store_si256(reinterpret_cast<__m256i*>(to.steps[kParts * g + p + 1] + at),
                           _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(two, two)));
        if constexpr (Format::kLeast) {
          const __m128i lows = pairs[(kParts + p) / 2];
          _mm256_store_si256(reinterpret_cast<__m256i*>(to.lows[(kParts * g + p) / 2] + at),
                             _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(lows, _mm_unpackhi_epi64(lows, lows))));
        }
      }
    }
  }

  // Byte p of all rows, then byte p + 1.
  static void turn_bytes(const __m128i (&rows)[kSideRows], __m128i (&pairs)[8]) {
    __m128i two[2][4], four[4][2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      two[0][i] = _mm_unpacklo_epi8(rows[2 * i], rows[2 * i + 1]);
      two[1][i] = _mm_unpackhi_epi8(rows[2 * i], rows[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      four[2 * (i / 2)][i % 2] = _mm_unpacklo_epi16(two[i / 2][2 * (i % 2)], two[i / 2][2 * (i % 2) + 1]);
      four[2 * (i / 2) + 1][i % 2] = _mm_unpackhi_epi16(two[i / 2][2 * (i % 2)], two[i / 2][2 * (i % 2) + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      pairs[2 * i] = _mm_unpacklo_epi32(four[i][0], four[i][1]);
      pairs[2 * i + 1] = _mm_unpackhi_epi32(four[i][0], four[i][1]);
    }
  }
};

}  // namespace
}  // namespace moelight
