// Few tokens rounded to int8 with codes as they are stored, row by row, for AVX2; internal linkage. Sums of whole
// numbers are exact, so results are those of panels (integers.inl) to the bit.
//
// `vpmaddubsw` adds two products of an unsigned code and a token in sixteen bits: codes of up to 6 bits as they are, of
// 8 bits as magnitudes, whose signs the token takes.
#pragma once

#include "integers.inl"
#include "quantized/panels_avx2.h"

namespace moelight {
namespace {

constexpr int64_t kStoredTokens = 2, kStoredAhead = 8 << 10;

inline int32_t across(__m256i sum) {
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

template <class T>
inline T number_at(const char* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

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
    if constexpr (std::is_same_v<Format, formats::Packed<4>>) {
      const __m128i packed = half_bytes_at(line + k / 2), mask = _mm_set1_epi8(15);
      const __m128i low = _mm_and_si128(packed, mask), high = _mm_and_si128(_mm_srli_epi16(packed, 4), mask);
      return _mm256_set_m128i(_mm_unpackhi_epi32(low, high), _mm_unpacklo_epi32(low, high));
    }
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
      const IntegerParts block = Format::parts(Format::block_of(*p.quantized, row, k));
      constexpr int kSteps = Format::kLeast ? 2 : 1;  // sixteen columns each that share one
      __m256i lanes[kTokens];
      for (auto& lane : lanes) lane = _mm256_setzero_si256();
      for (int64_t i = 0; i < 8; ++i) {
        const __m256i some = codes(k + 32 * i);
        const __m128i first = _mm_set1_epi16(static_cast<int16_t>(block.steps[2 * i / kSteps]));
        const __m128i second = _mm_set1_epi16(static_cast<int16_t>(block.steps[(2 * i + 1) / kSteps]));
        const __m256i step = _mm256_set_m128i(second, first);
#pragma GCC unroll 4
        for (int t = 0; t < kTokens; ++t) {
          const __m256i pairs = _mm256_maddubs_epi16(some, values(t, k + 32 * i));
          lanes[t] = _mm256_add_epi32(lanes[t], _mm256_madd_epi16(pairs, step));
        }
      }
      for (int t = 0; t < kTokens; ++t) {
        int32_t sum = across(lanes[t]), low = 0;
        const char* const parts = token(t) + layout.sums() + (Format::kLeast ? 2 : 4) * (k / form.part);
        if constexpr (Format::kLeast) {
          for (int i = 0; i < 8; ++i) low += block.lows[i] * number_at<int16_t>(parts + 2 * i);
        } else {
          for (int i = 0; i < 16; ++i) sum += block.steps[i] * number_at<int32_t>(parts + 4 * i);
        }
        float value = static_cast<float>(sum) * block.scale;
        if constexpr (Format::kLeast) value = value - static_cast<float>(low) * block.least;
        add(t, k, value, total);
      }
    }
  }
};

template <class Format, int kTokens = kStoredTokens>
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

// Of formats and sizes that whole steps of thirty-two columns serve.
inline bool stored_products(const Product& p, const IntegerForm& form, const IntegerTokens& layout, char*,
                            float* sums) {
  const Quantized& q = *p.quantized;
  if (p.tokens > kStoredTokens || p.depth % 32 != 0) return false;
  return with_format(q, [&](auto format) -> bool {
    using Format = decltype(format);
    constexpr bool kServed = kHasIntegers<Format> && kHasCodes<Format> && !std::is_same_v<Format, formats::Mxfp4Blocks>;
    if constexpr (kServed) {
      // Codes of eight bits are multiplied as signed ones.
      if (form.zero < 0 && StoredRow<Format, 1>::kBytes) return false;
      multiply_stored<Format>(p, form, layout, sums);
    }
    return kServed;
  });
}

}  // namespace
}  // namespace moelight
