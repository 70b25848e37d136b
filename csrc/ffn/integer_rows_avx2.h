// Few tokens rounded to int8 with codes as they are stored, for AVX2; internal linkage. Sums of whole
// numbers are exact, so results are those of panels (integers.inl) to the bit.
//
// `vpmaddubsw` adds two products of an unsigned code and a token in sixteen bits: codes of up to 6 bits as they are, of
// 8 bits as magnitudes, whose signs the token takes.
#pragma once

#include "integers.inl"
#include "quantized/panels_avx2.h"

namespace moelight {
namespace {

constexpr int64_t kStoredAhead = 8 << 10;
// The most tokens that meet rows as they are stored: more of them meet panels. Points take longer to look up than to
// multiply.
template <class Format>
constexpr int kStoredTokens = kHasPoints<Format> ? 4
                              : kParted<Format>  ? 1
                                                 : 2;

inline int32_t across(__m128i four) {
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
inline int32_t across(__m256i sum) {
  return across(_mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1)));
}

// Words `low` of the lower and `high` of the upper half, in all places.
inline __m256i spread_words(__m256i words, int low, int high) {
  const auto bytes = [](int word) { return _mm_set1_epi16(static_cast<int16_t>(514 * word + 256)); };
  return _mm256_shuffle_epi8(words, _mm256_set_m128i(bytes(high), bytes(low)));
}

// Of a block of Q4_K or Q5_K that begins at `block`: eight steps, and what is taken off (KScales).
template <class Format>
struct BlockSteps {
  const uint8_t* block;
  __m256i words;
  __m128i lows;
  float scale = fast_half_at(block), least = fast_half_at(block + 2);

  explicit BlockSteps(const uint8_t* block) : block(block) {
    const __m128i parts = steps_and_lows(block);
    words = _mm256_broadcastsi128_si256(_mm_cvtepu8_epi16(parts));
    lows = _mm_unpackhi_epi8(parts, _mm_setzero_si128());
  }
  __m256i of(int i) const { return spread_words(words, i, i); }
  static __m256i start(const char*) { return _mm256_setzero_si256(); }
  int32_t low(const char* sums) const {
    return across(_mm_madd_epi16(lows, half_bytes_at(reinterpret_cast<const uint8_t*>(sums))));
  }
};

// Of Q6_K and of points: sixteen steps.
template <class Format>
  requires(!Format::kLeast)
struct BlockSteps<Format> {
  const uint8_t* block;
  __m256i first, second;  // eight of them, twice
  __m256i words = _mm256_cvtepi8_epi16(part_steps(Format(), block));
  float scale = scale_of_parts(Format(), block);

  explicit BlockSteps(const uint8_t* block) : block(block) {
    first = _mm256_permute4x64_epi64(words, 0x44), second = _mm256_permute4x64_epi64(words, 0xee);
  }
  __m256i of(int i) const { return spread_words(i < 4 ? first : second, 2 * i % 8, 2 * i % 8 + 1); }
  // What codes are too large by: 32 times the steps times the parts' sums, which are given as -32 times those.
  __m256i start(const char* sums) const {
    if constexpr (kHasPoints<Format>) return _mm256_setzero_si256();
    const auto* const from = reinterpret_cast<const uint8_t*>(sums);
    const __m256i low = _mm256_srai_epi32(bytes_at(from), 5), high = _mm256_srai_epi32(bytes_at(from + 32), 5);
    const __m256i minus = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
    return _mm256_slli_epi32(_mm256_madd_epi16(words, minus), 5);
  }
};

// Thirty-two codes of a block as they are, and as magnitudes whose signs the token takes.
template <class Format>
struct BlockCodes {
  __m256i codes;
  BlockCodes(const uint8_t* block, int64_t k) : codes(panel_codes<Format>(block, k)) {}
  __m256i times(__m256i x) const { return _mm256_maddubs_epi16(codes, x); }
};
template <class Format>
  requires kHasPoints<Format>
struct BlockCodes<Format> {
  SignedPoints points;
  BlockCodes(const uint8_t* block, int64_t k) : points(points_of(Format(), block, k)) {}
  __m256i times(__m256i x) const { return _mm256_maddubs_epi16(points.magnitudes, _mm256_sign_epi8(x, points.signs)); }
};

template <class Format, int kTokens>
struct StoredRow {
  static constexpr bool kBytes = kSignedBytes<Format> || std::is_same_v<Format, formats::Packed<8>>;

  const Product& p;
  const IntegerForm& form;
  const IntegerTokens& layout;
  int64_t row;
  const uint8_t* line = p.quantized->codes + row * p.quantized->row_bytes;

  const char* token(int t) const { return p.x + t * p.x_bytes; }
  __m256i values(int t, int64_t k) const { return bytes_at(reinterpret_cast<const uint8_t*>(token(t)) + k); }

  // As tokens stand: with magnitudes of signed codes, or with codes as they are.
  __m256i codes(int64_t k) const {
    const __m256i codes = panel_codes<Format>(line, k);
    return kBytes ? _mm256_xor_si256(codes, _mm256_set1_epi8(static_cast<char>(0x80))) : codes;
  }

  // Sums of columns [k, k + size), which share a scale, of (code - zero) times numbers.
  void group(int64_t k, int64_t size, int32_t zero, int32_t (&sum)[kTokens]) const {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i lanes[kTokens];
    for (auto& lane : lanes) lane = _mm256_setzero_si256();
    for (int64_t i = k; i < k + size; i += 32) {
      const __m256i some = codes(i);
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; ++t) {
        const __m256i x = values(t, i);
        if constexpr (kBytes) {
          const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(some), _mm256_sign_epi8(x, some));
          lanes[t] = _mm256_add_epi32(lanes[t], _mm256_madd_epi16(pairs, ones));
        } else {
          lanes[t] = _mm256_add_epi16(lanes[t], _mm256_maddubs_epi16(some, x));
        }
      }
    }
    for (int t = 0; t < kTokens; ++t) {
      if constexpr (kBytes) {
        sum[t] = across(lanes[t]);
      } else {
        const auto minus = number_at<int32_t>(token(t) + layout.sums() + 4 * (k / form.group));
        sum[t] = across(_mm256_madd_epi16(lanes[t], ones)) + (form.zero >= 0 ? minus : zero * minus);
      }
    }
  }

  void add_groups(float (&total)[kTokens]) const {
    for (int64_t k = 0; k < p.depth; k += form.group) {
      const IntegerLine by = Format::integer_line(*p.quantized, row, k);
      int32_t sum[kTokens];
      group(k, std::min(form.group, p.depth - k), by.zero, sum);
      for (int t = 0; t < kTokens; ++t) add(t, k, static_cast<float>(sum[t]) * by.scale, total);
    }
  }

  void add(int t, int64_t k, float value, float (&total)[kTokens]) const {
    total[t] = total[t] + value * number_at<float>(token(t) + layout.scales() + 4 * (k / form.group));
  }

  // Blocks of 256, whose parts have steps of their own.
  void add_blocks(float (&total)[kTokens]) const {
    for (int64_t k = 0; k < p.depth; k += 256) {
      const BlockSteps<Format> steps(Format::block_of(*p.quantized, row, k));
      __m256i lanes[kTokens];
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; ++t) lanes[t] = steps.start(part_sums(t, k));
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        const BlockCodes<Format> codes(steps.block, 32 * i);
        const __m256i step = steps.of(i);
#pragma GCC unroll 4
        for (int t = 0; t < kTokens; ++t)
          lanes[t] = _mm256_add_epi32(lanes[t], _mm256_madd_epi16(codes.times(values(t, k + 32 * i)), step));
      }
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; ++t) {
        float value = static_cast<float>(across(lanes[t])) * steps.scale;
        if constexpr (Format::kLeast) value = value - static_cast<float>(steps.low(part_sums(t, k))) * steps.least;
        add(t, k, value, total);
      }
    }
  }

  const char* part_sums(int t, int64_t k) const {
    return token(t) + layout.sums() + (Format::kLeast ? 2 : 4) * (k / form.part);
  }
};

template <class Format, int kTokens = kStoredTokens<Format>>
void multiply_stored(const Product& p, const IntegerForm& form, const IntegerTokens& layout, float* sums) {
  if (p.tokens < kTokens) {
    if constexpr (kTokens > 1) multiply_stored<Format, kTokens - 1>(p, form, layout, sums);
    return;
  }
  const Quantized& q = *p.quantized;
  const int64_t rows_ahead = (kStoredAhead + q.row_bytes - 1) / q.row_bytes;
  for (int64_t r = 0; r < p.rows; ++r) {
    const StoredRow<Format, kTokens> row = {p, form, layout, p.first_row + r};
    const char* const ahead = reinterpret_cast<const char*>(row.line) + p.lead_of(r, rows_ahead);
    for (int64_t i = 0; i < q.row_bytes; i += 64) _mm_prefetch(ahead + i, _MM_HINT_T1);
    float total[kTokens];
    for (int t = 0; t < kTokens; ++t) total[t] = sums[t * kUnitRows + r];
    if constexpr (kParted<Format>) {
      row.add_blocks(total);
    } else {
      row.add_groups(total);
    }
    for (int t = 0; t < kTokens; ++t) sums[t * kUnitRows + r] = total[t];
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// ggml's blocks of 32 and rows of pairs, of eight rows side by side: from the end of a group on a lane is a row.

// The most tokens that meet them so: more of them meet panels.
template <class Format>
constexpr int kSideTokens = kSignedBytes<Format> ? 4 : 1;

// Sums of the neighbouring words of four registers, those of the first beside those of the others.
inline __m256i across_four(__m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i ab = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
  const __m256i cd = _mm256_add_epi32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
  return _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
}
// The lower halves beside each other, plus the upper ones.
inline __m256i across_halves(__m256i a, __m256i b) {
  const __m256i low = _mm256_inserti128_si256(a, _mm256_castsi256_si128(b), 1);
  return _mm256_add_epi32(low, _mm256_inserti128_si256(b, _mm256_extracti128_si256(a, 1), 0));
}

// sum[t] = the products of one block of eight rows. Signed bytes are multiplied row by row, by magnitudes that meet
// tokens of their signs; the products are added across the lanes of all eight together.
template <class Format, int kTokens>
struct SideSums {
  static void of(const uint8_t* const (&block)[kSideRows], const char* x, int64_t x_bytes, __m256i (&sum)[kTokens]) {
    __m256i four[2][kTokens];
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      __m256i one[kTokens][4];
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        const __m256i codes = codes_of(Format(), block[4 * half + r], 0), magnitudes = _mm256_abs_epi8(codes);
#pragma GCC unroll 4
        for (int t = 0; t < kTokens; ++t) {
          const __m256i values = bytes_at(reinterpret_cast<const uint8_t*>(x + t * x_bytes));
          const __m256i pairs = _mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8(values, codes));
          one[t][r] = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
        }
      }
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; ++t) four[half][t] = across_four(one[t][0], one[t][1], one[t][2], one[t][3]);
    }
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t) sum[t] = across_halves(four[0][t], four[1][t]);
  }
};

// Narrow codes have their words turned first. Sums of four products fit sixteen bits, those of eight where a code has
// no more than four bits.
template <class Format>
  requires(kHalvedBlocks<Format> || kPairedRows<Format>)
struct SideSums<Format, 1> {
  static void of(const uint8_t* const (&block)[kSideRows], const char* x, int64_t, __m256i (&sum)[1]) {
    __m256i words[2];
    nibble_quads<Format>(block, 0, [&](int quad, __m256i codes) {
      const __m256i four = _mm256_set1_epi32(number_at<int32_t>(x + 4 * quad));
      const __m256i pairs = _mm256_maddubs_epi16(codes, four);
      words[quad / 4] = quad % 4 == 0 ? pairs : _mm256_add_epi16(words[quad / 4], pairs);
    });
    const __m256i ones = _mm256_set1_epi16(1);
    if constexpr (kFiveBitBlocks<Format> || kE2m1<Format>) {
      sum[0] = _mm256_add_epi32(_mm256_madd_epi16(words[0], ones), _mm256_madd_epi16(words[1], ones));
    } else {
      sum[0] = _mm256_madd_epi16(_mm256_add_epi16(words[0], words[1]), ones);
    }
  }
};

// sums[t][0..8) += products of eight rows, asking memory for what lies `lead` bytes ahead of all of them.
template <class Format, int kTokens>
void multiply_side(const Product& p, const IntegerTokens& layout, int64_t row, int64_t lead, float* sums) {
  constexpr int64_t kBytes = Format::kTraits.block_bytes;
  const Quantized& q = *p.quantized;
  const uint8_t* block[kSideRows];
  for (int64_t r = 0; r < kSideRows; ++r)
    block[r] = q.codes + (p.first_row + std::min(row + r, p.rows - 1)) * q.row_bytes;
  const char *ahead = reinterpret_cast<const char*>(block[0]) + lead, *asked = ahead;
  __m256 total[kTokens];
#pragma GCC unroll 4
  for (int t = 0; t < kTokens; ++t) total[t] = _mm256_loadu_ps(sums + t * kUnitRows);
  for (int64_t k = 0, group = 0; k < p.depth; k += 32, ++group) {
    for (ahead += kSideRows * kBytes; asked < ahead; asked += 64) _mm_prefetch(asked, _MM_HINT_T1);
    __m256i sum[kTokens];
    SideSums<Format, kTokens>::of(block, p.x + k, p.x_bytes, sum);
    const SideLines by = side_lines<Format>(block);
#pragma GCC unroll 8
    for (auto& at : block) at += kBytes;
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t) {
      const char* const token = p.x + t * p.x_bytes;
      if constexpr (!Format::kLeast && !kSignedBytes<Format>)
        sum[t] = _mm256_add_epi32(sum[t], _mm256_set1_epi32(number_at<int32_t>(token + layout.sums() + 4 * group)));
      __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(sum[t]), by.scale);
      if constexpr (Format::kLeast) {
        const auto low = static_cast<float>(number_at<int16_t>(token + layout.sums() + 2 * group));
        value = _mm256_sub_ps(value, _mm256_mul_ps(_mm256_set1_ps(low), by.least));
      }
      value = _mm256_mul_ps(value, _mm256_set1_ps(number_at<float>(token + layout.scales() + 4 * group)));
      total[t] = _mm256_add_ps(total[t], value);
    }
  }
#pragma GCC unroll 4
  for (int t = 0; t < kTokens; ++t) _mm256_storeu_ps(sums + t * kUnitRows, total[t]);
}

// part(row, lead): of the eight rows from `row` on.
template <class F>
void by_sides(const Product& p, F&& part) {
  const int64_t bytes = kSideRows * p.row_bytes, later = kSideRows * ((kStoredAhead + bytes - 1) / bytes);
  for (int64_t row = 0; row < p.rows; row += kSideRows) part(row, p.lead_of(row, later));
}

template <class Format, int kTokens = kSideTokens<Format>>
void multiply_blocks(const Product& p, const IntegerTokens& layout, float* sums) {
  if constexpr (kTokens > 1)
    if (p.tokens < kTokens) return multiply_blocks<Format, kTokens - 1>(p, layout, sums);
  by_sides(p, [&](int64_t row, int64_t lead) { multiply_side<Format, kTokens>(p, layout, row, lead, sums + row); });
}

// The same of rows of pairs, and of one token.
template <class Format>
void multiply_pairs_side(const Product& p, const IntegerForm& form, const IntegerTokens& layout, int64_t row,
                         int64_t lead, float* sums) {
  const Quantized& q = *p.quantized;
  const RowScales by(q, p.first_row + row, p.rows - row);
  const uint8_t* block[kSideRows];
  for (int64_t r = 0; r < kSideRows; ++r) block[r] = q.codes + by.rows[r] * q.row_bytes;
  const char *ahead = reinterpret_cast<const char*>(block[0]) + lead, *asked = ahead;
  __m256 total = _mm256_loadu_ps(sums), scale = _mm256_setzero_ps();
  __m256i zero = _mm256_set1_epi32(1);
  int64_t next = 0;  // column of the next scale
  for (int64_t k = 0, group = 0; k < p.depth; ++group) {
    if (k == next) {
      scale = by.scales(by.group_of(k));
      if (form.zero < 0) zero = by.template zeros<Format>(k);
      next += q.groups == 1 ? p.depth : q.group;
    }
    __m256i sum = _mm256_setzero_si256();
    for (const int64_t end = std::min(k + form.group, p.depth); k < end; k += 32) {
      for (ahead += kSideRows * kSideBytes<Format>; asked < ahead; asked += 64) _mm_prefetch(asked, _MM_HINT_T1);
      __m256i some[1];
      SideSums<Format, 1>::of(block, p.x + k, p.x_bytes, some);
      sum = _mm256_add_epi32(sum, some[0]);
#pragma GCC unroll 8
      for (auto& at : block) at += kSideBytes<Format>;
    }
    const __m256i minus = _mm256_set1_epi32(number_at<int32_t>(p.x + layout.sums() + 4 * group));
    sum = _mm256_add_epi32(sum, form.zero < 0 ? _mm256_mullo_epi32(zero, minus) : minus);
    const __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), scale);
    total =
        _mm256_add_ps(total, _mm256_mul_ps(value, _mm256_set1_ps(number_at<float>(p.x + layout.scales() + 4 * group))));
  }
  _mm256_storeu_ps(sums, total);
}

// Of formats and sizes that whole steps of thirty-two columns serve.
inline bool stored_products(const Product& p, const IntegerForm& form, const IntegerTokens& layout, char*,
                            float* sums) {
  if (p.depth % 32 != 0) return false;
  return with_format(*p.quantized, [&](auto format) -> bool {
    using Format = decltype(format);
    if constexpr (kBlocksOf32<Format> && kHasIntegers<Format>) {
      if (p.tokens > kSideTokens<Format>) return false;
      multiply_blocks<Format>(p, layout, sums);
      return true;
    } else if constexpr (kPairedRows<Format>) {
      if (p.tokens > 1) return false;
      by_sides(p,
               [&](int64_t row, int64_t lead) { multiply_pairs_side<Format>(p, form, layout, row, lead, sums + row); });
      return true;
    } else if constexpr (kHasIntegers<Format> && kHasCodes<Format>) {
      // Codes of eight bits are multiplied as signed ones.
      if (p.tokens > kStoredTokens<Format> || (form.zero < 0 && StoredRow<Format, 1>::kBytes)) return false;
      multiply_stored<Format>(p, form, layout, sums);
      return true;
    }
    return false;
  });
}

}  // namespace
}  // namespace moelight
