// Rows of quantised matrices as vectors of thirty-two bf16, for AVX-512 with BF16. Internal linkage.
//
// Codes of up to five bits are looked up in a table of all their numbers in a group, rounded to bf16: an index is the
// five lowest bits of a word, whatever stands above them. Wider ones go through float32. Products in float32 of scales
// and codes are exact in these formats, so that a fused subtraction rounds as one after the other does.
//
// A format says lines(matrix, row, first, size, lead, line): line(32 numbers) for each of size / 32 parts of a row.
#pragma once

#include <immintrin.h>

#include "numbers.h"

namespace moelight {
namespace {

inline __m512i join(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }
inline __m512i twice(__m512 table) { return join(table, table); }
inline __m512 counting() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
inline __m512i look_up(__m512i index, __m512i table) { return _mm512_permutexvar_epi16(index, table); }
inline __m256i load32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline __m128i load16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline void fetch_from(const void* p, int64_t lead) { _mm_prefetch(static_cast<const char*>(p) + lead, _MM_HINT_T0); }

// Indices by sixteen bytes of two codes each, the lower bits first.
inline __m512i by_pairs(const uint8_t* p) {
  const __m512i two = _mm512_cvtepu8_epi32(load16(p));
  return _mm512_or_si512(two, _mm512_slli_epi32(two, 12));
}
// By sixteen bytes: first the lower bits of all.
inline __m512i by_halves(const uint8_t* p) {
  const __m256i two = _mm256_cvtepu8_epi16(load16(p));
  return _mm512_inserti64x4(_mm512_castsi256_si512(two), _mm256_srli_epi16(two, 4), 1);
}
// The first words of a in `mask`, the others of b.
inline __m512i select(int mask, __m512i a, __m512i b) {
  return _mm512_ternarylogic_epi32(_mm512_set1_epi16(static_cast<int16_t>(mask)), a, b, 0xca);
}

inline __m512 half_of(const uint8_t* p) {
  int16_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return _mm512_cvtph_ps(_mm256_set1_epi16(bits));
}

inline __m512 floats_of(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }
inline __m512i scaled_bytes(__m256i bytes, __m512 low, __m512 high) {
  return join(_mm512_mul_ps(floats_of(_mm256_castsi256_si128(bytes)), low),
              _mm512_mul_ps(floats_of(_mm256_extracti128_si256(bytes, 1)), high));
}

// part(from, to, zero point and scale) of each run of columns in one group, which are multiples of 32.
template <class Part>
void by_groups(const Quantized& q, int64_t row, int64_t first, int64_t size, Part&& part) {
  for (int64_t k = first, end = first + size; k < end;) {
    const int64_t group = k / q.group, stop = q.groups == 1 ? end : std::min(end, (group + 1) * q.group);
    part(k, stop, line_of(q, row, group));
    k = stop;
  }
}

inline __m512i table_of(const Line& line) {
  return twice(_mm512_mul_ps(_mm512_sub_ps(counting(), _mm512_set1_ps(line.zero)), _mm512_set1_ps(line.scale)));
}

struct Fp8Lines {
  template <class F>
  static void lines(const Quantized& q, int64_t row, int64_t first, int64_t size, int64_t lead, F&& line) {
    const uint8_t* const codes = q.codes + row * q.row_bytes;
    by_groups(q, row, first, size, [&](int64_t k, int64_t stop, const Line& scales) {
      // A code is a float16 2^8 too small, except those that are no numbers.
      const __m512 scale = _mm512_set1_ps(scales.scale), power = _mm512_set1_ps(256.0f);
      for (; k < stop; k += 32) {
        fetch_from(codes + k, lead);
        const __m256i bytes = load32(codes + k), all = _mm256_set1_epi8(127);
        const __mmask32 lost = _mm256_cmpeq_epi8_mask(_mm256_and_si256(bytes, all), all);
        const __m512i shifted = _mm512_srai_epi16(_mm512_slli_epi16(_mm512_cvtepu8_epi16(bytes), 8), 1);
        const __m512i halves = _mm512_and_si512(shifted, _mm512_set1_epi16(static_cast<int16_t>(0xbf80)));
        const __m512 low = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(halves)), power);
        const __m512 high = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)), power);
        const __m512i found = join(_mm512_mul_ps(low, scale), _mm512_mul_ps(high, scale));
        line(_mm512_mask_mov_epi16(found, lost, _mm512_set1_epi16(0x7fc0)));
      }
    });
  }
};

// Bytes less a zero point, signed or not.
template <bool kSigned>
struct ByteLines {
  template <class F>
  static void part(const uint8_t* codes, int64_t size, int64_t lead, const Line& by, F&& line) {
    const __m512 zero = _mm512_set1_ps(by.zero), scale = _mm512_set1_ps(by.scale);
    const auto wide = [](const uint8_t* p) {
      return _mm512_cvtepi32_ps(kSigned ? _mm512_cvtepi8_epi32(load16(p)) : _mm512_cvtepu8_epi32(load16(p)));
    };
    for (const uint8_t* const end = codes + size; codes < end; codes += 32) {
      fetch_from(codes, lead);
      line(join(_mm512_mul_ps(_mm512_sub_ps(wide(codes), zero), scale),
                _mm512_mul_ps(_mm512_sub_ps(wide(codes + 16), zero), scale)));
    }
  }
  template <class F>
  static void lines(const Quantized& q, int64_t row, int64_t first, int64_t size, int64_t lead, F&& line) {
    const uint8_t* const codes = q.codes + row * q.row_bytes;
    by_groups(q, row, first, size,
              [&](int64_t k, int64_t stop, const Line& by) { part(codes + k, stop - k, lead, by, line); });
  }
};

struct NibbleLines {
  template <class F>
  static void part(const uint8_t* codes, int64_t size, int64_t lead, const Line& by, F&& line) {
    const __m512i table = table_of(by);
    for (const uint8_t* const end = codes + size / 2; codes < end; codes += 16) {
      fetch_from(codes, lead);
      line(look_up(by_pairs(codes), table));
    }
  }
  template <class F>
  static void lines(const Quantized& q, int64_t row, int64_t first, int64_t size, int64_t lead, F&& line) {
    const uint8_t* const codes = q.codes + row * q.row_bytes;
    by_groups(q, row, first, size,
              [&](int64_t k, int64_t stop, const Line& by) { part(codes + k / 2, stop - k, lead, by, line); });
  }
};

struct MxLines {
  template <class F>
  static void lines(const Quantized& q, int64_t row, int64_t first, int64_t size, int64_t lead, F&& line) {
    const uint8_t* codes = q.codes + row * q.row_bytes + first / 2;
    const auto* const powers = static_cast<const uint8_t*>(q.scales) + row * q.groups + first / 32;
    const int64_t count = size / 32;
    alignas(64) float scale[kMostColumns / 32];
    for (int64_t i = 0; i < count; i += 16) {
      const auto there = static_cast<__mmask16>((uint32_t{1} << std::min<int64_t>(16, count - i)) - 1);
      const __m512i e = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(there, powers + i));
      const __m512i one = _mm512_set1_epi32(1), normal = _mm512_slli_epi32(_mm512_sub_epi32(e, one), 23);
      const __m512i subnormal = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), e);
      _mm512_store_si512(scale + i, _mm512_mask_mov_epi32(subnormal, _mm512_cmpgt_epu32_mask(e, one), normal));
    }
    const __m512 values = _mm512_loadu_ps(kTwiceE2m1);
    for (int64_t i = 0; i < count; ++i, codes += 16) {
      fetch_from(codes, lead);
      line(look_up(by_pairs(codes), twice(_mm512_mul_ps(values, _mm512_set1_ps(scale[i])))));
    }
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// ggml's blocks of 32.

template <Packing kPacking>
struct SmallLines {
  static constexpr bool kLeast = kPacking == Packing::kQ4_1 || kPacking == Packing::kQ5_1;
  static constexpr bool kFive = kPacking == Packing::kQ5_0 || kPacking == Packing::kQ5_1;
  static constexpr int64_t kHead = kPacking == Packing::kMxBlocks ? 1 : kLeast ? 4 : 2;

  static __m512i table(const uint8_t* p) {
    if constexpr (kPacking == Packing::kMxBlocks)
      return twice(_mm512_mul_ps(_mm512_loadu_ps(kDoubledE2m1), _mm512_set1_ps(half_power_of(p[0]))));
    const __m512 scale = half_of(p);
    if constexpr (kPacking == Packing::kIq4Nl) return twice(_mm512_mul_ps(_mm512_loadu_ps(kIq4), scale));
    const __m512 sixteen = _mm512_set1_ps(16), values = counting();
    if constexpr (kLeast) {
      const __m512 least = half_of(p + 2), low = _mm512_fmadd_ps(values, scale, least);
      return join(low, kFive ? _mm512_fmadd_ps(_mm512_add_ps(values, sixteen), scale, least) : low);
    }
    if constexpr (kFive)
      return join(_mm512_mul_ps(_mm512_sub_ps(values, sixteen), scale), _mm512_mul_ps(values, scale));
    return twice(_mm512_mul_ps(_mm512_sub_ps(values, _mm512_set1_ps(8)), scale));
  }

  template <class F>
  static void lines(const Quantized& q, int64_t row, int64_t first, int64_t size, int64_t lead, F&& line) {
    constexpr int64_t kBytes = block_size(kPacking).bytes;
    const uint8_t* p = q.codes + row * q.row_bytes + first / 32 * kBytes;
    for (const uint8_t* const end = p + size / 32 * kBytes; p < end; p += kBytes) {
      fetch_from(p, lead);
      if constexpr (kPacking == Packing::kQ8_0) {
        const __m512 scale = half_of(p);
        line(scaled_bytes(load32(p + 2), scale, scale));
      } else if constexpr (kFive) {
        const __m512i high = _mm512_maskz_set1_epi16(word_at(p + kHead, 0), 16);
        line(look_up(select(15, by_halves(p + kHead + 4), high), table(p)));
      } else {
        line(look_up(by_halves(p + kHead), table(p)));
      }
    }
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Of 256: begin(block) reads what a block's lines share, line(i) is the i-th of its eight.

inline uint32_t low_bits(uint32_t bytes, int shift, int mask) {
  return (bytes >> shift) & (0x01010101u * static_cast<uint32_t>(mask));
}
inline __m128i four_words(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return _mm_setr_epi32(static_cast<int>(a), static_cast<int>(b), static_cast<int>(c), static_cast<int>(d));
}

template <bool kFive>
struct KBlock {
  explicit KBlock(const uint8_t* p) : codes(p + (kFive ? 48 : 16)) {
    const uint32_t a = word_at(p, 1), b = word_at(p, 2), both = word_at(p, 3);
    const __m128i packed = four_words(low_bits(a, 0, 63), low_bits(both, 0, 15) | low_bits(a, 2, 48),
                                      low_bits(b, 0, 63), low_bits(both, 4, 15) | low_bits(b, 2, 48));
    const __m512 halves = _mm512_insertf32x8(half_of(p), _mm512_castps512_ps256(half_of(p + 2)), 1);
    _mm512_store_ps(steps, _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(packed)), halves));
    if constexpr (kFive) fifth = _mm512_slli_epi16(_mm512_cvtepu8_epi16(load32(p + 16)), 4);
  }
  __m512i line(int i) const {
    const __m512i two = _mm512_cvtepu8_epi16(load32(codes + 32 * (i / 2)));
    const __m512i index = i % 2 == 0 ? two : _mm512_srli_epi16(two, 4);
    const __m512 step = _mm512_set1_ps(steps[i]), below = _mm512_set1_ps(steps[8 + i]);
    const __m512 low = _mm512_fmsub_ps(counting(), step, below);
    if constexpr (!kFive) return look_up(index, twice(low));
    const __m512 high = _mm512_fmsub_ps(_mm512_add_ps(counting(), _mm512_set1_ps(16)), step, below);
    return look_up(select(15, index, _mm512_srl_epi16(fifth, _mm_cvtsi32_si128(i))), join(low, high));
  }

  alignas(64) float steps[16];  // of eight groups, and what is subtracted
  const uint8_t* codes;
  __m512i fifth;
};

// Indices of two bits, and the sixteenth entry on for the second half of a line.
inline __m512i by_quarters(__m512i four, int i) {
  const __m512i upper = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
  return select(3, _mm512_srl_epi16(four, _mm_cvtsi32_si128(2 * (i % 4))), upper);
}

struct Q2Block {
  explicit Q2Block(const uint8_t* p) : codes(p + 16) {
    const __m512i packed = _mm512_cvtepu8_epi32(load16(p));
    const __m512i low = _mm512_and_si512(packed, _mm512_set1_epi32(15)), high = _mm512_srli_epi32(packed, 4);
    _mm512_store_ps(steps, _mm512_mul_ps(_mm512_cvtepi32_ps(low), half_of(p + 80)));
    _mm512_store_ps(below, _mm512_mul_ps(_mm512_cvtepi32_ps(high), half_of(p + 82)));
  }
  __m512i line(int i) const {
    const __m512 values = _mm512_setr_ps(0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3);
    const __m512 a = _mm512_fmsub_ps(values, _mm512_set1_ps(steps[2 * i]), _mm512_set1_ps(below[2 * i]));
    const __m512 b = _mm512_fmsub_ps(values, _mm512_set1_ps(steps[2 * i + 1]), _mm512_set1_ps(below[2 * i + 1]));
    return look_up(by_quarters(_mm512_cvtepu8_epi16(load32(codes + 32 * (i / 4))), i), join(a, b));
  }

  alignas(64) float steps[16], below[16];
  const uint8_t* codes;
};

struct Q3Block {
  explicit Q3Block(const uint8_t* p) : codes(p + 32), third(_mm512_slli_epi16(_mm512_cvtepu8_epi16(load32(p)), 2)) {
    const uint32_t a = word_at(p, 24), b = word_at(p, 25), c = word_at(p, 26);
    const __m128i packed =
        four_words(low_bits(a, 0, 15) | low_bits(c, 0, 3) << 4, low_bits(b, 0, 15) | low_bits(c, 2, 3) << 4,
                   low_bits(a, 4, 15) | low_bits(c, 4, 3) << 4, low_bits(b, 4, 15) | low_bits(c, 6, 3) << 4);
    const __m512i scales = _mm512_sub_epi32(_mm512_cvtepu8_epi32(packed), _mm512_set1_epi32(32));
    _mm512_store_ps(steps, _mm512_mul_ps(_mm512_cvtepi32_ps(scales), half_of(p + 108)));
  }
  __m512i line(int i) const {
    const __m512 values = _mm512_setr_ps(-4, -3, -2, -1, 0, 1, 2, 3, -4, -3, -2, -1, 0, 1, 2, 3);
    const __m512i quarters = by_quarters(_mm512_cvtepu8_epi16(load32(codes + 32 * (i / 4))), i);
    const __m512i index = select(4, _mm512_srl_epi16(third, _mm_cvtsi32_si128(i)), quarters);
    return look_up(index, join(_mm512_mul_ps(values, _mm512_set1_ps(steps[2 * i])),
                               _mm512_mul_ps(values, _mm512_set1_ps(steps[2 * i + 1]))));
  }

  alignas(64) float steps[16];
  const uint8_t* codes;
  __m512i third;
};

struct Q6Block {
  explicit Q6Block(const uint8_t* p) : codes(p) {
    _mm512_store_ps(steps, _mm512_mul_ps(floats_of(load16(p + 192)), half_of(p + 208)));
  }
  __m512i line(int i) const {
    const int half = i / 4, quarter = i % 4;
    const __m256i low = load32(codes + 64 * half + 32 * (quarter % 2)), high = load32(codes + 128 + 32 * half);
    const __m256i four = _mm256_srl_epi16(low, _mm_cvtsi32_si128(4 * (quarter / 2)));
    const __m256i bits = _mm256_and_si256(high, _mm256_set1_epi8(static_cast<char>(3 << (2 * quarter))));
    const __m256i two =
        quarter == 3 ? _mm256_srli_epi16(bits, 2) : _mm256_sll_epi16(bits, _mm_cvtsi32_si128(4 - 2 * quarter));
    const __m256i both = _mm256_or_si256(_mm256_and_si256(four, _mm256_set1_epi8(15)), two);
    return scaled_bytes(_mm256_sub_epi8(both, _mm256_set1_epi8(32)), _mm512_set1_ps(steps[2 * i]),
                        _mm512_set1_ps(steps[2 * i + 1]));
  }

  alignas(64) float steps[16];
  const uint8_t* codes;
};

struct Iq4Block {
  explicit Iq4Block(const uint8_t* p) : codes(p + 8) {
    for (int i = 0; i < 8; ++i) steps[i] = half_at(p) * iq4_scale(p, i);
  }
  __m512i line(int i) const {
    return look_up(by_halves(codes + 16 * i), twice(_mm512_mul_ps(_mm512_loadu_ps(kIq4), _mm512_set1_ps(steps[i]))));
  }

  float steps[8];
  const uint8_t* codes;
};

template <class Block, Packing kPacking>
struct LargeLines {
  template <class F>
  static void lines(const Quantized& q, int64_t row, int64_t first, int64_t size, int64_t lead, F&& line) {
    constexpr int64_t kBytes = block_size(kPacking).bytes;
    for (int64_t k = first, end = first + size; k < end;) {
      const uint8_t* const p = q.codes + row * q.row_bytes + k / 256 * kBytes;
      const Block block(p);
      const auto begin = static_cast<int>(k % 256 / 32),
                 stop = static_cast<int>(std::min<int64_t>(256, k % 256 + end - k) / 32);
      for (int64_t at = 64 * (begin * kBytes / 512); at < kBytes * stop / 8; at += 64) fetch_from(p + at, lead);
      if (begin == 0 && stop == 8) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) line(block.line(i));
      } else {
        for (int i = begin; i < stop; ++i) line(block.line(i));
      }
      k += 32 * (stop - begin);
    }
  }
};

}  // namespace
}  // namespace moelight
