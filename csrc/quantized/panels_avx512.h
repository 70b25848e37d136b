// Panels filled with AVX-512: words of sixteen rows are turned into vectors of one word a row, which are codes of four
// columns or, in halves of bytes, of eight. What is irregular (rows that do not come in sixteens, rare formats) is
// filled in plain code. Internal linkage.
#pragma once

#include <immintrin.h>

#include "integers.h"
#include "moelight/transpose_avx512.h"

namespace moelight {
namespace {

constexpr int64_t kHalf = 16;  // rows turned together

inline __m512i load64(const void* p) { return _mm512_loadu_si512(p); }
inline __m128i bytes16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline __m256i bytes32(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __mmask16 first16(int64_t count) {
  return static_cast<__mmask16>(count >= 16 ? 0xffff : (uint32_t{1} << count) - 1);
}

// Sixteen rows of a panel: from its row `at` on.
struct HalfPanel {
  Panel& panel;
  int64_t at;
  void put(int64_t quad, __m512i codes) const { _mm512_store_si512(panel.codes + (quad * kPanelRows + at) * 4, codes); }
};

inline __m512i low_halves(__m512i words) { return _mm512_and_si512(words, _mm512_set1_epi8(15)); }
inline __m512i high_halves(__m512i words) { return low_halves(_mm512_srli_epi16(words, 4)); }
inline __m512i e2m1_codes(__m512i halves) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes16(kE2m1Codes)), halves);
}
inline __m512i unsigned_bytes(__m512i words) { return _mm512_xor_si512(words, _mm512_set1_epi8(-128)); }

// How words become quads. kWordPairs: the halves of word w are quads 2 w and 2 w + 1; kBytes: word w is quad w;
// kBlockHalves<n>: of each n words first the low halves of all.
struct WordPairs {
  static constexpr int64_t kColumns = 128;  // in sixteen words
  static void put(const HalfPanel& to, int64_t quad, int64_t word, __m512i words) {
    to.put(quad + 2 * word, low_halves(words)), to.put(quad + 2 * word + 1, high_halves(words));
  }
};
struct MxPairs {
  static constexpr int64_t kColumns = 128;
  static void put(const HalfPanel& to, int64_t quad, int64_t word, __m512i words) {
    to.put(quad + 2 * word, e2m1_codes(low_halves(words)));
    to.put(quad + 2 * word + 1, e2m1_codes(high_halves(words)));
  }
};
struct SignedBytes {
  static constexpr int64_t kColumns = 64;
  static void put(const HalfPanel& to, int64_t quad, int64_t word, __m512i words) {
    to.put(quad + word, unsigned_bytes(words));
  }
};
struct UnsignedBytes {
  static constexpr int64_t kColumns = 64;
  static void put(const HalfPanel& to, int64_t quad, int64_t word, __m512i words) { to.put(quad + word, words); }
};
template <int kWords, bool kE2m1>
struct BlockHalves {
  static constexpr int64_t kColumns = 128;
  static void put(const HalfPanel& to, int64_t quad, int64_t word, __m512i words) {
    const __m512i low = low_halves(words), high = high_halves(words);
    const int64_t first = quad + word / kWords * 2 * kWords + word % kWords;
    to.put(first, kE2m1 ? e2m1_codes(low) : low), to.put(first + kWords, kE2m1 ? e2m1_codes(high) : high);
  }
};

// Brings what a row has next into the first-level cache: the processor does not see sixteen rows coming.
inline void fetch_soon(const void* p) { _mm_prefetch(static_cast<const char*>(p) + 128, _MM_HINT_T0); }

// The codes of sixteen rows; load(row, step) gives the `step`-th sixteen words of one, which take kBytes there.
template <class Words, int64_t kBytes, class Load>
void turned_codes(const HalfPanel& to, int64_t size, Fetched& fetched, Load&& load) {
  for (int64_t k = 0, step = 0; k < size; k += Words::kColumns, ++step) {
    __m512i rows[kHalf];
#pragma GCC unroll 16
    for (int64_t r = 0; r < kHalf; ++r) {
      rows[r] = load(r, step);
      if (fetched.next != nullptr) _mm_prefetch(fetched.next, _MM_HINT_T1), fetched.next += kBytes;
    }
    columns16(rows, [&](int64_t word, __m512i words) { Words::put(to, k / 4, word, words); });
  }
}

// Rows of words, each row_bytes after the other, `bytes` of each, which end where they end.
template <class Words>
void codes_by_rows(const uint8_t* const (&line)[kHalf], int64_t bytes, int64_t size, const HalfPanel& to,
                   Fetched& fetched) {
  turned_codes<Words, 64>(to, size, fetched, [&](int64_t r, int64_t step) {
    const int64_t left = bytes - 64 * step;
    fetch_soon(line[r] + 64 * step);
    if (left >= 64) return load64(line[r] + 64 * step);
    return _mm512_maskz_loadu_epi8((__mmask64{1} << left) - 1, line[r] + 64 * step);
  });
}

// Blocks of `bytes`, whose codes begin at kHead: as many at a time as have sixteen words.
template <class Words, int64_t kBytes, int64_t kHead>
void codes_by_blocks(const uint8_t* const (&line)[kHalf], int64_t size, const HalfPanel& to, Fetched& fetched) {
  constexpr int64_t kCodes = kBytes - kHead, kBlocks = 64 / kCodes;
  const int64_t blocks = size / 32;
  turned_codes<Words, kBlocks * kBytes>(to, size, fetched, [&](int64_t r, int64_t step) {
    const uint8_t* const at = line[r] + step * kBlocks * kBytes + kHead;
    const int64_t left = blocks - step * kBlocks;
    fetch_soon(at);
    if constexpr (kBlocks == 2) {
      const __m512i low = _mm512_castsi256_si512(bytes32(at));
      return left < 2 ? low : _mm512_inserti64x4(low, bytes32(at + kBytes), 1);
    }
    __m512i result = _mm512_castsi128_si512(bytes16(at));
    if (left > 1) result = _mm512_inserti32x4(result, bytes16(at + kBytes), 1);
    if (left > 2) result = _mm512_inserti32x4(result, bytes16(at + 2 * kBytes), 2);
    return left > 3 ? _mm512_inserti32x4(result, bytes16(at + 3 * kBytes), 3) : result;
  });
}

// Words of sixteen rows beside each other (GPTQ): nothing is turned.
template <class Words>
void codes_by_columns(const Quantized& q, int64_t row, int64_t first, int64_t size, const HalfPanel& to) {
  constexpr int64_t kPer = Words::kColumns / 16;
  for (int64_t word = 0; word * kPer < size; ++word) {
    const uint8_t* const at = q.codes + 4 * ((first / kPer + word) * q.rows + row);
    _mm_prefetch(reinterpret_cast<const char*>(at) + 32 * q.rows, _MM_HINT_T0);
    Words::put(to, 0, word, load64(at));
  }
}

// ---------------------------------------------------------------------------------------------------------------------

inline __m512 scales16(const Quantized& q, int64_t at, __mmask16 lanes) {
  const auto* const from = static_cast<const char*>(q.scales);
  switch (q.scale_type) {
    case ScaleType::kFloat32:
      return _mm512_maskz_loadu_ps(lanes, from + 4 * at);
    case ScaleType::kBFloat16:
      return _mm512_castsi512_ps(
          _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from + 2 * at)), 16));
    case ScaleType::kFloat16:
      return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes, from + 2 * at));
    case ScaleType::kPower:
      break;
  }
  alignas(64) float result[16] = {};
  for (int64_t i = 0; i < 16; ++i)
    if (lanes >> i & 1) result[i] = scale_at(q, at + i);
  return _mm512_load_ps(result);
}

// Halves of the powers of sixteen bytes.
inline __m512 half_powers16(const void* p, __mmask16 lanes) {
  const __m512i e = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(lanes, p)), one = _mm512_set1_epi32(1);
  const __m512i subnormal = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), e);
  const __mmask16 normal = _mm512_cmpgt_epu32_mask(e, one);
  return _mm512_castsi512_ps(_mm512_mask_slli_epi32(subnormal, normal, _mm512_sub_epi32(e, one), 23));
}

// Scales that lie by rows; load(row, first group, those that are there) gives sixteen groups of one.
template <class Load>
void scales_by_rows(const Quantized& q, const IntegerForm& form, int64_t first, int64_t size, const HalfPanel& to,
                    Load&& load) {
  const int64_t from = q.groups == 1 ? 0 : first / q.group;
  const __mmask16 lanes = first16(q.groups - from);
  __m512i rows[kHalf];
  for (int64_t r = 0; r < kHalf; ++r) rows[r] = _mm512_castps_si512(load(r, from, lanes));
  alignas(64) float columns[16][16];
  columns16(rows, [&](int64_t column, __m512i words) { _mm512_store_si512(columns[column], words); });
  for (int64_t k = 0, g = 0; k < size; k += form.group, ++g) {
    const int64_t column = q.groups == 1 ? 0 : (first + k) / q.group - from;
    _mm512_store_ps(to.panel.scales[g] + to.at, _mm512_load_ps(columns[column]));
  }
}

// Zero points of sixteen rows in two words, rows of eight beside each other in `places`.
inline __m512i zeros16(uint32_t low, uint32_t high, __m512i places, int bias) {
  const __m512i words =
      _mm512_inserti64x4(_mm512_set1_epi32(static_cast<int>(low)), _mm256_set1_epi32(static_cast<int>(high)), 1);
  const __m512i result = _mm512_add_epi32(_mm512_srlv_epi32(words, places), _mm512_set1_epi32(bias));
  return _mm512_and_si512(result, _mm512_set1_epi32(15));
}

// Scales, and zero points of four bits, that lie by columns.
inline void lines_by_columns(const Quantized& q, const IntegerForm& form, int64_t row, int64_t first, int64_t size,
                             const HalfPanel& to) {
  const __m512i places = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
  for (int64_t k = 0, g = 0; k < size; k += form.group, ++g) {
    const int64_t group = (first + k) / q.group;
    _mm512_store_ps(to.panel.scales[g] + to.at, scales16(q, group * q.rows + row, 0xffff));
    const int64_t word = group * (q.rows / 8) + row / 8;
    _mm512_store_si512(to.panel.zeros[g] + to.at,
                       zeros16(word_at(q.zeros, word), word_at(q.zeros, word + 1), places, q.zero_bias));
  }
}

// Scales of ggml's blocks: float16 at the beginning of each, or a power of two.
template <int64_t kBytes, bool kPower>
void scales_of_blocks(const uint8_t* const (&line)[kHalf], int64_t size, const HalfPanel& to) {
  for (int64_t b = 0; b < size / 32; ++b) {
    alignas(32) uint16_t halves[kHalf];
    alignas(16) uint8_t powers[kHalf];
    for (int64_t r = 0; r < kHalf; ++r) {
      std::memcpy(halves + r, line[r] + b * kBytes, 2);
      powers[r] = static_cast<uint8_t>(halves[r] & 255);
    }
    const __m512 scales =
        kPower ? half_powers16(powers, 0xffff) : _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<__m256i*>(halves)));
    _mm512_store_ps(to.panel.scales[b] + to.at, scales);
  }
}

// Sixteen bytes from `at` of each row as four vectors of one word a row.
inline void four_columns(const uint8_t* const (&line)[kHalf], int64_t at, __m512i (&words)[4]) {
  __m512i rows[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm512_castsi128_si512(bytes16(line[i] + at));
    rows[i] = _mm512_inserti32x4(rows[i], bytes16(line[4 + i] + at), 1);
    rows[i] = _mm512_inserti32x4(rows[i], bytes16(line[8 + i] + at), 2);
    rows[i] = _mm512_inserti32x4(rows[i], bytes16(line[12 + i] + at), 3);
  }
  const __m512i a = _mm512_unpacklo_epi32(rows[0], rows[1]), b = _mm512_unpackhi_epi32(rows[0], rows[1]);
  const __m512i c = _mm512_unpacklo_epi32(rows[2], rows[3]), d = _mm512_unpackhi_epi32(rows[2], rows[3]);
  words[0] = _mm512_unpacklo_epi64(a, c), words[1] = _mm512_unpackhi_epi64(a, c);
  words[2] = _mm512_unpacklo_epi64(b, d), words[3] = _mm512_unpackhi_epi64(b, d);
}

// The low sixteen bits of words as float16.
inline __m512 halves16(__m512i words) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words)); }
inline __m512i low_bits16(__m512i words, int shift, int mask) {
  return _mm512_and_si512(_mm512_srl_epi32(words, _mm_cvtsi32_si128(shift)), _mm512_set1_epi32(mask));
}

// Scales of ggml's blocks that begin with one and with a minimum, which is the negative of what is taken off.
template <int64_t kBytes>
void lines_of_blocks(const uint8_t* const (&line)[kHalf], int64_t size, const HalfPanel& to) {
  for (int64_t b = 0; b < size / 32; ++b) {
    alignas(64) uint32_t heads[kHalf];
    for (int64_t r = 0; r < kHalf; ++r) std::memcpy(heads + r, line[r] + b * kBytes, 4);
    const __m512i words = _mm512_load_si512(heads), sign = _mm512_set1_epi32(static_cast<int>(0x80000000));
    const __m512i least = _mm512_castps_si512(halves16(_mm512_srli_epi32(words, 16)));
    _mm512_store_ps(to.panel.scales[b] + to.at, halves16(words));
    _mm512_store_si512(to.panel.least[b] + to.at, _mm512_xor_si512(least, sign));
  }
}

// The fifth bits of the codes of blocks, which are four bytes from kAt on, beside the others in a panel.
template <int64_t kBytes, int64_t kAt>
void fifth_bits_of_blocks(const uint8_t* const (&line)[kHalf], int64_t size, const HalfPanel& to) {
  alignas(64) uint32_t spread[16];
  for (uint32_t i = 0; i < 16; ++i) spread[i] = (i & 1) << 4 | (i & 2) << 11 | (i & 4) << 18 | (i & 8) << 25;
  const __m512i table = _mm512_load_si512(spread);
  for (int64_t b = 0; b < size / 32; ++b) {
    alignas(64) uint32_t bits[kHalf];
    for (int64_t r = 0; r < kHalf; ++r) std::memcpy(bits + r, line[r] + b * kBytes + kAt, 4);
    __m512i four = _mm512_load_si512(bits);
    for (int64_t quad = 8 * b; quad < 8 * (b + 1); ++quad, four = _mm512_srli_epi32(four, 4)) {
      uint8_t* const codes = to.panel.codes + (quad * kPanelRows + to.at) * 4;
      to.put(quad, _mm512_or_si512(_mm512_load_si512(codes), _mm512_permutexvar_epi32(four, table)));
    }
  }
}

// Scales and parts of a block of Q4_K or Q5_K (KScales) that begins at byte `at`, those of a group.
inline void k_scales(const uint8_t* const (&line)[kHalf], int64_t at, int64_t group, const HalfPanel& to) {
  __m512i words[4], lows[8];
  four_columns(line, at, words);
  _mm512_store_ps(to.panel.scales[group] + to.at, halves16(words[0]));
  _mm512_store_ps(to.panel.least[group] + to.at, halves16(_mm512_srli_epi32(words[0], 16)));
  const auto put = [&](int i, __m512i step) { _mm512_store_si512(to.panel.steps[8 * group + i] + to.at, step); };
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    put(i, low_bits16(words[1], 8 * i, 63)), lows[i] = low_bits16(words[2], 8 * i, 63);
    put(4 + i, _mm512_or_si512(low_bits16(words[3], 8 * i, 15), low_bits16(words[1], 8 * i + 2, 48)));
    lows[4 + i] = _mm512_or_si512(low_bits16(words[3], 8 * i + 4, 15), low_bits16(words[2], 8 * i + 2, 48));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    _mm512_store_si512(to.panel.lows[4 * group + i] + to.at,
                       _mm512_or_si512(lows[2 * i], _mm512_slli_epi32(lows[2 * i + 1], 16)));
}

// Sixty-four bytes from `at` of each row, which are fetched further on, as sixteen vectors: put(word, words).
template <class Put>
void all_columns(const uint8_t* const (&line)[kHalf], int64_t at, int64_t bytes_of_next, Fetched& fetched, Put&& put) {
  __m512i rows[kHalf];
#pragma GCC unroll 16
  for (int64_t r = 0; r < kHalf; ++r) {
    rows[r] = load64(line[r] + at);
    fetch_soon(line[r] + at);
    if (fetched.next != nullptr) _mm_prefetch(fetched.next, _MM_HINT_T1), fetched.next += bytes_of_next;
  }
  columns16(rows, put);
}

// Q4_K: of `size` columns, a multiple of 256, from `line` on.
inline void k4_panel(const uint8_t* const (&line)[kHalf], int64_t size, const HalfPanel& to, Fetched& fetched) {
  for (int64_t block = 0; block < size / 256; ++block) {
    k_scales(line, block * 144, block, to);
    for (int64_t half = 0; half < 2; ++half)
      all_columns(line, block * 144 + 16 + 64 * half, 72, fetched, [&](int64_t word, __m512i words) {
        BlockHalves<8, false>::put(to, 64 * block + 32 * half, word, words);
      });
  }
}

// Bits `from` and higher of bytes, as many as `mask` has from bit 4 on, at bit 4.
inline __m512i high_bits(__m512i bytes, int from, int mask) {
  const __m512i moved = from > 4 ? _mm512_srl_epi16(bytes, _mm_cvtsi32_si128(from - 4))
                                 : _mm512_sll_epi16(bytes, _mm_cvtsi32_si128(4 - from));
  return _mm512_and_si512(moved, _mm512_set1_epi8(static_cast<char>(mask)));
}

// Q5_K: the fifth bits of column k of each part are byte k of thirty-two.
inline void k5_panel(const uint8_t* const (&line)[kHalf], int64_t size, const HalfPanel& to, Fetched& fetched) {
  for (int64_t block = 0; block < size / 256; ++block) {
    k_scales(line, block * 176, block, to);
    __m512i fifth[8], words[4];
    for (int i = 0; i < 2; ++i) {
      four_columns(line, block * 176 + 16 + 16 * i, words);
      for (int j = 0; j < 4; ++j) fifth[4 * i + j] = words[j];
    }
    for (int half = 0; half < 2; ++half)
      all_columns(line, block * 176 + 48 + 64 * half, 88, fetched, [&](int64_t word, __m512i codes) {
        const int part = 4 * half + 2 * static_cast<int>(word / 8);
        const __m512i above = fifth[word % 8];
        const int64_t quad = 64 * block + 8 * part + word % 8;
        to.put(quad, _mm512_or_si512(low_halves(codes), high_bits(above, part, 16)));
        to.put(quad + 8, _mm512_or_si512(high_halves(codes), high_bits(above, part + 1, 16)));
      });
  }
}

// Q6_K: of each half block sixty-four bytes of lower bits, and thirty-two of which a byte has the upper bits of four
// columns.
inline void k6_panel(const uint8_t* const (&line)[kHalf], int64_t size, const HalfPanel& to, Fetched& fetched) {
  for (int64_t block = 0; block < size / 256; ++block) {
    const int64_t begin = 210 * block;
    __m512i words[4];
    alignas(32) uint16_t halves[kHalf];
    for (int64_t r = 0; r < kHalf; ++r) std::memcpy(halves + r, line[r] + begin + 208, 2);
    _mm512_store_ps(to.panel.scales[block] + to.at,
                    _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<__m256i*>(halves))));
    four_columns(line, begin + 192, words);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const __m512i step = _mm512_srai_epi32(_mm512_sll_epi32(words[i / 4], _mm_cvtsi32_si128(24 - 8 * (i % 4))), 24);
      _mm512_store_si512(to.panel.steps[16 * block + i] + to.at, step);
    }
    __m512i upper[16];
    all_columns(line, begin + 128, 70, fetched, [&](int64_t word, __m512i bits) { upper[word] = bits; });
    for (int64_t half = 0; half < 2; ++half)
      all_columns(line, begin + 64 * half, 70, fetched, [&](int64_t word, __m512i codes) {
        const int quarter = static_cast<int>(word / 8);
        const __m512i bits = upper[8 * half + word % 8];
        const int64_t quad = 64 * block + 32 * half + word;
        to.put(quad, _mm512_or_si512(low_halves(codes), high_bits(bits, 2 * quarter, 48)));
        to.put(quad + 16, _mm512_or_si512(high_halves(codes), high_bits(bits, 4 + 2 * quarter, 48)));
      });
  }
}

// ---------------------------------------------------------------------------------------------------------------------

template <class Format>
void zeros_by_rows(const Quantized& q, const IntegerForm& form, int64_t row, int64_t count, int64_t first, int64_t size,
                   const HalfPanel& to) {
  const __m512i places = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
  const bool full = std::is_same_v<Format, formats::Packed<4>> && row % 8 == 0 && count == kHalf;
  for (int64_t k = 0, g = 0; k < size; k += form.group, ++g) {
    const int64_t group = q.groups == 1 ? 0 : (first + k) / q.group;
    int32_t* const zeros = to.panel.zeros[g] + to.at;
    if (full) {
      const int64_t word = row / 8 * q.groups + group;
      _mm512_store_si512(zeros, zeros16(word_at(q.zeros, word), word_at(q.zeros, word + q.groups), places, 0));
      continue;
    }
    for (int64_t r = 0; r < count; ++r) zeros[r] = Format::integer_line(q, row + r, first + k).zero;
  }
}

// Where the codes of sixteen rows begin.
using Lines = const uint8_t* const (&)[kHalf];

// Codes of formats whose scales lie beside them, `bytes` of each row.
inline void half_codes(formats::Int8, Lines line, int64_t bytes, int64_t size, const HalfPanel& to, Fetched& fetched) {
  codes_by_rows<SignedBytes>(line, bytes, size, to, fetched);
}
inline void half_codes(formats::Packed<4>, Lines line, int64_t bytes, int64_t size, const HalfPanel& to,
                       Fetched& fetched) {
  codes_by_rows<WordPairs>(line, bytes, size, to, fetched);
}
inline void half_codes(formats::Packed<8>, Lines line, int64_t bytes, int64_t size, const HalfPanel& to,
                       Fetched& fetched) {
  codes_by_rows<UnsignedBytes>(line, bytes, size, to, fetched);
}
inline void half_codes(formats::Mxfp4, Lines line, int64_t bytes, int64_t size, const HalfPanel& to, Fetched& fetched) {
  codes_by_rows<MxPairs>(line, bytes, size, to, fetched);
}

// Codes and scales of blocks.
inline void half_blocks(formats::Q4K, Lines line, int64_t size, const HalfPanel& to, Fetched& fetched) {
  k4_panel(line, size, to, fetched);
}
inline void half_blocks(formats::Q5K, Lines line, int64_t size, const HalfPanel& to, Fetched& fetched) {
  k5_panel(line, size, to, fetched);
}
inline void half_blocks(formats::Q6K, Lines line, int64_t size, const HalfPanel& to, Fetched& fetched) {
  k6_panel(line, size, to, fetched);
}
inline void half_blocks(formats::Q4_0, Lines line, int64_t size, const HalfPanel& to, Fetched& fetched) {
  codes_by_blocks<BlockHalves<4, false>, 18, 2>(line, size, to, fetched);
  scales_of_blocks<18, false>(line, size, to);
}
inline void half_blocks(formats::Q4_1, Lines line, int64_t size, const HalfPanel& to, Fetched& fetched) {
  codes_by_blocks<BlockHalves<4, false>, 20, 4>(line, size, to, fetched);
  lines_of_blocks<20>(line, size, to);
}
inline void half_blocks(formats::Q5_0, Lines line, int64_t size, const HalfPanel& to, Fetched& fetched) {
  codes_by_blocks<BlockHalves<4, false>, 22, 6>(line, size, to, fetched);
  fifth_bits_of_blocks<22, 2>(line, size, to);
  scales_of_blocks<22, false>(line, size, to);
}
inline void half_blocks(formats::Q5_1, Lines line, int64_t size, const HalfPanel& to, Fetched& fetched) {
  codes_by_blocks<BlockHalves<4, false>, 24, 8>(line, size, to, fetched);
  fifth_bits_of_blocks<24, 4>(line, size, to);
  lines_of_blocks<24>(line, size, to);
}
inline void half_blocks(formats::Mxfp4Blocks, Lines line, int64_t size, const HalfPanel& to, Fetched& fetched) {
  codes_by_blocks<BlockHalves<4, true>, 17, 1>(line, size, to, fetched);
  scales_of_blocks<17, true>(line, size, to);
}
inline void half_blocks(formats::Q8_0, Lines line, int64_t size, const HalfPanel& to, Fetched& fetched) {
  codes_by_blocks<SignedBytes, 34, 2>(line, size, to, fetched);
  scales_of_blocks<34, false>(line, size, to);
}

// Sixteen rows, or fewer whose last one stands for those that are missing, of formats that lie by rows.
template <class Format>
void fill_half(const Quantized& q, const IntegerForm& form, int64_t row, int64_t count, int64_t first, int64_t size,
               const HalfPanel& to, Fetched& fetched) {
  const uint8_t* line[kHalf];
  const int64_t begin = first / Format::kTraits.block * Format::kTraits.block_bytes;
  for (int64_t r = 0; r < kHalf; ++r) line[r] = q.codes + (row + std::min(r, count - 1)) * q.row_bytes + begin;
  if constexpr (kInBlocks<Format>) {
    half_blocks(Format(), line, size, to, fetched);
  } else {
    half_codes(Format(), line, q.row_bytes - begin, size, to, fetched);
    if (Format::kTraits.scales == Scales::kByTiles && q.group_rows != 1)
      return plain_lines<Format>(q, form, row, count, first, size, to.at, to.panel);
    scales_by_rows(q, form, first, size, to, [&](int64_t r, int64_t from, __mmask16 lanes) {
      const int64_t at = (row + std::min(r, count - 1)) * q.groups + from;
      if (kE2m1<Format>) return half_powers16(static_cast<const uint8_t*>(q.scales) + at, lanes);
      return scales16(q, at, lanes);
    });
    if (form.zero < 0) zeros_by_rows<Format>(q, form, row, count, first, size, to);
  }
}

// The same of sixteen rows of GPTQ, from a multiple of eight on.
template <int kBits>
void fill_half_by_columns(const Quantized& q, const IntegerForm& form, int64_t row, int64_t first, int64_t size,
                          const HalfPanel& to) {
  if constexpr (kBits == 4) {
    codes_by_columns<WordPairs>(q, row, first, size, to);
    lines_by_columns(q, form, row, first, size, to);
  } else {
    codes_by_columns<UnsignedBytes>(q, row, first, size, to);
    plain_lines<formats::Gptq<kBits>>(q, form, row, kHalf, first, size, to.at, to.panel);
  }
}

template <class Format>
constexpr bool kHasHalves = requires(Lines line, const HalfPanel& to, Fetched& fetched) {
  half_codes(Format(), line, 0, 0, to, fetched);
} || requires(Lines line, const HalfPanel& to, Fetched& fetched) { half_blocks(Format(), line, 0, to, fetched); };

template <class Format>
struct WidePanels : PlainPanels<Format> {};

template <class Format>
  requires kHasHalves<Format>
struct WidePanels<Format> {
  static void fill(const Quantized& q, const IntegerForm& form, int64_t row, int64_t rows, int64_t first, int64_t size,
                   Fetched& fetched, Panel& to) {
    for (int64_t at = 0; at < kPanelRows && at < rows; at += kHalf)
      fill_half<Format>(q, form, row + at, std::min(kHalf, rows - at), first, size, {to, at}, fetched);
  }
};

template <int kBits>
struct WidePanels<formats::Gptq<kBits>> {
  static void fill(const Quantized& q, const IntegerForm& form, int64_t row, int64_t rows, int64_t first, int64_t size,
                   Fetched&, Panel& to) {
    for (int64_t at = 0; at < kPanelRows && at < rows; at += kHalf) {
      const int64_t count = std::min(kHalf, rows - at);
      if (count == kHalf && (row + at) % 8 == 0) {
        fill_half_by_columns<kBits>(q, form, row + at, first, size, {to, at});
        continue;
      }
      for (int64_t r = 0; r < count; ++r)
        plain_codes<formats::Gptq<kBits>>(q, form, row + at + r, first, 0, size, at + r, to);
      plain_lines<formats::Gptq<kBits>>(q, form, row + at, count, first, size, at, to);
    }
  }
};

}  // namespace
}  // namespace moelight
