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

template <Packing kPacking, int kBits, int kTokens>
struct StoredRow {
  static constexpr bool kSixth = kPacking == Packing::kQ6_K;
  static constexpr bool kLarge = kSixth || kPacking == Packing::kQ4_K || kPacking == Packing::kQ5_K;
  static constexpr bool kBytes =
      kPacking == Packing::kInt8 || kPacking == Packing::kQ8_0 || (kPacking == Packing::kPacked && kBits == 8);

  const Product& p;
  const IntegerForm& form;
  const IntegerTokens& layout;
  int64_t row;
  const uint8_t* line = p.quantized->codes + row * p.quantized->row_bytes;

  const char* token(int t) const { return p.x + t * p.x_bytes; }
  __m256i numbers(int t, int64_t k) const { return bytes_at(reinterpret_cast<const uint8_t*>(token(t)) + k); }

  // As tokens stand: with magnitudes of signed codes, or with codes as they are.
  __m256i codes(int64_t k) const {
    if constexpr (kPacking == Packing::kPacked && kBits == 4) {
      const __m128i both = half_bytes_at(line + k / 2), mask = _mm_set1_epi8(15);
      const __m128i low = _mm_and_si128(both, mask), high = _mm_and_si128(_mm_srli_epi16(both, 4), mask);
      return _mm256_set_m128i(_mm_unpackhi_epi32(low, high), _mm_unpacklo_epi32(low, high));
    }
    const __m256i codes = panel_codes<kPacking, kBits>(line, k);
    return kBytes ? _mm256_xor_si256(codes, _mm256_set1_epi8(static_cast<char>(0x80))) : codes;
  }

  // Sums of columns [k, k + size), which share a scale, of (code - zero) times numbers.
  void group(int64_t k, int64_t size, int32_t zero, int32_t (&sum)[kTokens]) const {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i lanes[kTokens];
    for (auto& each : lanes) each = _mm256_setzero_si256();
    for (int64_t i = k; i < k + size; i += 32) {
      const __m256i some = codes(i);
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; ++t) {
        const __m256i x = numbers(t, i);
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
      const IntegerLine by = integer_line(*p.quantized, row, k);
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
      const uint8_t* const block = line + k / 256 * block_size(kPacking).bytes;
      int32_t steps[16], lows[8] = {};
      if constexpr (kSixth) {
        for (int i = 0; i < 16; ++i) steps[i] = static_cast<int8_t>(block[192 + i]);
      } else {
        const KScales parts(block + 4);
        for (int i = 0; i < 16; ++i) steps[i] = parts.scale[i / 2];
        for (int i = 0; i < 8; ++i) lows[i] = parts.least[i];
      }
      __m256i lanes[kTokens];
      for (auto& each : lanes) each = _mm256_setzero_si256();
      for (int64_t i = 0; i < 8; ++i) {
        const __m256i some = codes(k + 32 * i);
        const __m128i first = _mm_set1_epi16(static_cast<int16_t>(steps[2 * i]));
        const __m128i second = _mm_set1_epi16(static_cast<int16_t>(steps[2 * i + 1]));
        const __m256i step = _mm256_set_m128i(second, first);
#pragma GCC unroll 4
        for (int t = 0; t < kTokens; ++t) {
          const __m256i pairs = _mm256_maddubs_epi16(some, numbers(t, k + 32 * i));
          lanes[t] = _mm256_add_epi32(lanes[t], _mm256_madd_epi16(pairs, step));
        }
      }
      for (int t = 0; t < kTokens; ++t) {
        int32_t sum = across(lanes[t]), low = 0;
        const char* const parts = token(t) + layout.sums() + (kSixth ? 4 : 2) * (k / form.part);
        for (int i = 0; kSixth && i < 16; ++i) sum += steps[i] * number_at<int32_t>(parts + 4 * i);
        for (int i = 0; !kSixth && i < 8; ++i) low += lows[i] * number_at<int16_t>(parts + 2 * i);
        float value = static_cast<float>(sum) * half_at(kSixth ? block + 208 : block);
        if constexpr (!kSixth) value = value - static_cast<float>(low) * half_at(block + 2);
        add(t, k, value, total);
      }
    }
  }
};

template <Packing kPacking, int kBits, int kTokens = kStoredTokens>
void multiply_stored(const Product& p, const IntegerForm& form, const IntegerTokens& layout, float* sums) {
  if (p.tokens < kTokens) {
    if constexpr (kTokens > 1) multiply_stored<kPacking, kBits, kTokens - 1>(p, form, layout, sums);
    return;
  }
  const Quantized& q = *p.quantized;
  const int64_t rows_ahead = (kStoredAhead + q.row_bytes - 1) / q.row_bytes;
  for (int64_t r = 0; r < p.rows; ++r) {
    const StoredRow<kPacking, kBits, kTokens> row = {p, form, layout, p.first_row + r};
    const char* const ahead = reinterpret_cast<const char*>(row.line) + p.lead_of(r, rows_ahead);
    for (int64_t i = 0; i < q.row_bytes; i += 64) _mm_prefetch(ahead + i, _MM_HINT_T1);
    float total[kTokens];
    for (int t = 0; t < kTokens; ++t) total[t] = sums[t * kUnitRows + r];
    row.kLarge ? row.add_blocks(total) : row.add_groups(total);
    for (int t = 0; t < kTokens; ++t) sums[t * kUnitRows + r] = total[t];
  }
}

// Of formats and sizes that whole steps of thirty-two columns serve.
inline bool stored_products(const Product& p, const IntegerForm& form, const IntegerTokens& layout, char*,
                            float* sums) {
  const Quantized& q = *p.quantized;
  if (p.tokens > kStoredTokens || p.depth % 32 != 0) return false;
  switch (q.packing) {
    case Packing::kPacked:
      if (q.bits == 4) return multiply_stored<Packing::kPacked, 4>(p, form, layout, sums), true;
      if (q.zeros != nullptr) return false;
      return multiply_stored<Packing::kPacked, 8>(p, form, layout, sums), true;
    case Packing::kInt8:
      if (q.zeros != nullptr) return false;
      return multiply_stored<Packing::kInt8, 8>(p, form, layout, sums), true;
    case Packing::kMx:
      return multiply_stored<Packing::kMx, 4>(p, form, layout, sums), true;
    case Packing::kQ4_0:
      return multiply_stored<Packing::kQ4_0, 4>(p, form, layout, sums), true;
    case Packing::kQ8_0:
      return multiply_stored<Packing::kQ8_0, 8>(p, form, layout, sums), true;
    case Packing::kQ4_K:
      return multiply_stored<Packing::kQ4_K, 4>(p, form, layout, sums), true;
    case Packing::kQ5_K:
      return multiply_stored<Packing::kQ5_K, 5>(p, form, layout, sums), true;
    case Packing::kQ6_K:
      return multiply_stored<Packing::kQ6_K, 6>(p, form, layout, sums), true;
    default:
      return false;
  }
}

}  // namespace
}  // namespace moelight
