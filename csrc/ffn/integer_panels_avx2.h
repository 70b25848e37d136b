// Tokens rounded to int8 with panels of codes (integers.inl), for AVX2: four tokens and sixteen rows at a time.
// Internal linkage. Sums of whole numbers are exact, so results are those of other lanes to the bit.
//
// `vpmaddubsw` adds two products in sixteen bits, and the sums of kRun columns of narrow codes fit there too. What
// brings them to thirty-two bits multiplies them by the step of their part at once. Codes of eight bits meet tokens as
// words.
#pragma once

#include "integers_avx2.h"

namespace moelight {
namespace {

constexpr int kSumTokens = 4, kSumVectors = 2;
constexpr int64_t kSumRows = 8 * kSumVectors;

// Columns whose products with codes of at most `max_code`, summed by words, fit sixteen bits; 0: not even two.
constexpr int64_t run_of(int max_code) {
  int64_t columns = 32;
  while (columns > 2 && columns / 2 * max_code * 127 > 32767) columns /= 2;
  return columns > 2 ? columns : 0;
}

inline __m256i lanes_at(const void* p) { return _mm256_load_si256(static_cast<const __m256i*>(p)); }
inline __m256i four_at(const char* p) { return _mm256_set1_epi32(number_at<int32_t>(p)); }

// The sum as it is: gcc would add the terms of a sum of whole numbers in another order, from memory.
inline __m256i in_order(__m256i sum) {
  asm("" : "+x"(sum));
  return sum;
}

template <int kTokens>
using LaneSums = __m256i[kTokens][kSumVectors];

// Tokens as words, in fours of columns: the even ones, and the odd ones.
struct WordTokens {
  alignas(32) int16_t even[kSumTokens][kPanelColumns / 2], odd[kSumTokens][kPanelColumns / 2];

  void widen(const char* x, int64_t x_bytes, int64_t tokens, int64_t size) {
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t k = 0; k < size; k += 32) {
        const __m256i bytes = bytes_at(reinterpret_cast<const uint8_t*>(x + t * x_bytes + k));
        _mm256_store_si256(reinterpret_cast<__m256i*>(even[t] + k / 2),
                           _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8));
        _mm256_store_si256(reinterpret_cast<__m256i*>(odd[t] + k / 2), _mm256_srai_epi16(bytes, 8));
      }
    }
  }
};

// Of forms of parts without `least`: minus the sums of the numbers of neighbouring parts, as pairs of words.
struct PartPairs {
  alignas(32) int32_t of[kSumTokens][kPanelParts / 2];

  // From those sums times the zero point, 2^kShift.
  template <int kShift>
  void narrow(const char* sums, int64_t x_bytes, int64_t tokens, int64_t parts) {
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t p = 0; p < parts; p += 16) {
        const auto* const from = reinterpret_cast<const uint8_t*>(sums + t * x_bytes + 4 * p);
        const __m256i low = _mm256_srai_epi32(bytes_at(from), kShift);
        const __m256i high = _mm256_srai_epi32(bytes_at(from + 32), kShift);
        _mm256_store_si256(reinterpret_cast<__m256i*>(of[t] + p / 2),
                           _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8));
      }
    }
  }
};

// Of forms with `least` and without parts: the sums of the numbers of groups.
struct GroupLows {
  alignas(32) float of[kSumTokens][kPanelGroups];

  void widen(const char* sums, int64_t x_bytes, int64_t tokens) {
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t g = 0; g < kPanelGroups; g += 8) {
        const __m128i eight = half_bytes_at(reinterpret_cast<const uint8_t*>(sums + t * x_bytes + 2 * g));
        _mm256_store_ps(of[t] + g, _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(eight)));
      }
    }
  }
};

// A panel and the tokens that it meets, from one of its columns on.
template <int kTokens>
struct PanelTile {
  const IntegerForm form;
  const IntegerTokens layout;
  const Panel& panel;
  const int64_t first, size;
  const char* const x;
  const int64_t x_bytes;
  float* const __restrict sums;

  template <class F>
  static inline __attribute__((always_inline)) void for_each(F&& body) {
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t)
#pragma GCC unroll 2
      for (int v = 0; v < kSumVectors; ++v) body(t, v);
  }

  const uint8_t* codes_at(int64_t k, int64_t row) const { return panel.codes + k * kPanelRows + 4 * row; }

  // sum += times the words that columns [k, k + kColumns) add up to, kRun of them at a time.
  template <int64_t kRun, int64_t kColumns>
  inline __attribute__((always_inline)) void add_words(int64_t k, int64_t row, const __m256i (&times)[kSumVectors],
                                                       LaneSums<kTokens>& sum) const {
    const uint8_t* codes = codes_at(k, row);
    const char* token = x + first + k;
#pragma GCC unroll 8
    for (int64_t i = 0; i < kColumns; i += kRun, token += kRun) {
      LaneSums<kTokens> words;
#pragma GCC unroll 8
      for (int64_t j = 0; j < kRun; j += 4, codes += 4 * kPanelRows) {
        const __m256i low = in_order(lanes_at(codes)), high = in_order(lanes_at(codes + 32));
#pragma GCC unroll 4
        for (int t = 0; t < kTokens; ++t) {
          const __m256i four = four_at(token + t * x_bytes + j);
          const __m256i first_pairs = _mm256_maddubs_epi16(low, four), pairs = _mm256_maddubs_epi16(high, four);
          words[t][0] = in_order(j == 0 ? first_pairs : _mm256_add_epi16(words[t][0], first_pairs));
          words[t][1] = in_order(j == 0 ? pairs : _mm256_add_epi16(words[t][1], pairs));
        }
      }
      for_each([&](int t, int v) {
        sum[t][v] = in_order(_mm256_add_epi32(sum[t][v], _mm256_madd_epi16(words[t][v], times[v])));
      });
    }
  }

  // sum += the products of columns [k, k + kColumns) with codes of any size.
  template <int64_t kColumns>
  inline __attribute__((always_inline)) void add_wide(const WordTokens& words, int64_t k, int64_t row,
                                                      LaneSums<kTokens>& sum) const {
    const uint8_t* codes = codes_at(k, row);
#pragma GCC unroll 8
    for (int64_t j = k; j < k + kColumns; j += 4, codes += 4 * kPanelRows) {
      const __m256i mask = _mm256_set1_epi16(255), first_codes = lanes_at(codes), codes_after = lanes_at(codes + 32);
      const __m256i even[kSumVectors] = {in_order(_mm256_and_si256(first_codes, mask)),
                                         in_order(_mm256_and_si256(codes_after, mask))};
      const __m256i odd[kSumVectors] = {in_order(_mm256_srli_epi16(first_codes, 8)),
                                        in_order(_mm256_srli_epi16(codes_after, 8))};
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; ++t) {
        const __m256i evens = four_at(reinterpret_cast<const char*>(words.even[t] + j / 2));
#pragma GCC unroll 2
        for (int v = 0; v < kSumVectors; ++v)
          sum[t][v] = in_order(_mm256_add_epi32(sum[t][v], _mm256_madd_epi16(even[v], evens)));
        const __m256i odds = four_at(reinterpret_cast<const char*>(words.odd[t] + j / 2));
#pragma GCC unroll 2
        for (int v = 0; v < kSumVectors; ++v)
          sum[t][v] = in_order(_mm256_add_epi32(sum[t][v], _mm256_madd_epi16(odd[v], odds)));
      }
    }
  }

  // Of forms without parts. kRun 0: codes of any size. kGroup 0: the form says it.
  template <int64_t kRun, int64_t kGroup, bool kLeast>
  void add_groups(const WordTokens& words, const GroupLows& lows) const {
    const PanelTile at = *this;  // which no store changes
    const int64_t group = kGroup > 0 ? kGroup : form.group, x_bytes = at.x_bytes, size = at.size;
    const bool shared = form.zero >= 0;
    const int64_t eights = (size + 7) / 8 * 8;  // whose order a form may change
    const __m256i ones[kSumVectors] = {_mm256_set1_epi16(1), _mm256_set1_epi16(1)};
    for (int64_t row = 0; row < kPanelRows; row += kSumRows) {
      const char* scale = at.x + at.layout.scales() + 4 * (at.first / group);
      const char* group_sum = at.x + at.layout.sums() + 4 * (at.first / group);
      for (int64_t k = 0, g = 0; k < size; k += group, ++g, scale += 4, group_sum += 4) {
        LaneSums<kTokens> sum;
        for_each([&](int t, int v) { sum[t][v] = _mm256_setzero_si256(); });
        const auto add = [&](int64_t i, auto columns) __attribute__((always_inline)) {
          if constexpr (kRun > 0) {
            at.template add_words<std::min<int64_t>(kRun, columns), columns>(i, row, ones, sum);
          } else {
            at.template add_wide<columns>(words, i, row, sum);
          }
        };
        using Most = std::integral_constant<int64_t, 32>;
        using Least = std::integral_constant<int64_t, 4>;
        if constexpr (kGroup > 0) {
          static_assert(kGroup == Most());
          if (k + kGroup <= size) {
            add(k, Most());
          } else {
            for (int64_t i = k; i < eights; i += Least()) add(i, Least());
          }
        } else {
          int64_t i = k;
          const int64_t end = std::min(k + group, eights);
          for (; i + Most() <= end; i += Most()) add(i, Most());
          for (; i < end; i += Least()) add(i, Least());
        }
        __m256 by[kSumVectors], least[kSumVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kSumVectors; ++v) {
          by[v] = _mm256_load_ps(at.panel.scales[g] + row + 8 * v);
          if constexpr (kLeast) least[v] = _mm256_load_ps(at.panel.least[g] + row + 8 * v);
        }
#pragma GCC unroll 4
        for (int t = 0; t < kTokens; ++t) {
          const __m256 of_token = _mm256_set1_ps(number_at<float>(scale + t * x_bytes));
          __m256 value[kSumVectors];
#pragma GCC unroll 2
          for (int v = 0; v < kSumVectors; ++v) {
            if constexpr (!kLeast) {
              const __m256i minus = four_at(group_sum + t * x_bytes);
              sum[t][v] = _mm256_add_epi32(
                  sum[t][v], shared ? minus : _mm256_mullo_epi32(lanes_at(at.panel.zeros[g] + row + 8 * v), minus));
            }
            value[v] = _mm256_mul_ps(_mm256_cvtepi32_ps(sum[t][v]), by[v]);
            if constexpr (kLeast)
              value[v] = _mm256_sub_ps(value[v], _mm256_mul_ps(_mm256_set1_ps(lows.of[t][g]), least[v]));
            value[v] = _mm256_mul_ps(value[v], of_token);
          }
          float* const to = at.sums + t * kUnitRows + row;
#pragma GCC unroll 2
          for (int v = 0; v < kSumVectors; ++v)
            _mm256_storeu_ps(to + 8 * v, _mm256_add_ps(_mm256_loadu_ps(to + 8 * v), value[v]));
        }
      }
    }
  }

  // Of forms of parts, kPart columns each; kShift: of the zero point.
  template <int64_t kRun, int64_t kPart, int kShift, bool kLeast>
  void add_parts(const PartPairs& minus) const {
    constexpr int64_t kGroup = 256, kParts = kGroup / kPart;
    for (int64_t row = 0; row < kPanelRows; row += kSumRows) {
      const char* scale = x + layout.scales() + 4 * (first / kGroup);
      const char* low = x + layout.sums() + 2 * (first / kPart);
      for (int64_t k = 0, g = 0; k < size; k += kGroup, ++g, scale += 4, low += 2 * kParts) {
        LaneSums<kTokens> sum;
        for_each([&](int t, int v) { sum[t][v] = _mm256_setzero_si256(); });
        const auto& steps = panel.steps + kParts * g;
        if constexpr (!kLeast) {
          for (int64_t p = 0; p < kParts; p += 2) {
            for_each([&](int t, int v) {
              const __m256i one = lanes_at(steps[p] + row + 8 * v), two = lanes_at(steps[p + 1] + row + 8 * v);
              const __m256i pair = _mm256_blend_epi16(one, _mm256_slli_epi32(two, 16), 0xaa);
              const __m256i less = _mm256_set1_epi32(minus.of[t][(kParts * g + p) / 2]);
              sum[t][v] = _mm256_add_epi32(sum[t][v], _mm256_madd_epi16(pair, less));
            });
          }
          for_each([&](int t, int v) { sum[t][v] = _mm256_slli_epi32(sum[t][v], kShift); });
        }
        for (int64_t p = 0; p < kParts; ++p) {
          __m256i step[kSumVectors];
#pragma GCC unroll 2
          for (int v = 0; v < kSumVectors; ++v) {
            const __m256i one = lanes_at(steps[p] + row + 8 * v);
            step[v] = _mm256_blend_epi16(one, _mm256_slli_epi32(one, 16), 0xaa);
          }
          add_words<kRun, kPart>(k + p * kPart, row, step, sum);
        }
        __m256 value[kTokens][kSumVectors];
        for_each([&](int t, int v) {
          value[t][v] = _mm256_mul_ps(_mm256_cvtepi32_ps(sum[t][v]), _mm256_load_ps(panel.scales[g] + row + 8 * v));
        });
        if constexpr (kLeast) take_lows<kParts>(low, g, row, value);
        for_each([&](int t, int v) {
          float* const to = sums + t * kUnitRows + row + 8 * v;
          const __m256 by = _mm256_set1_ps(number_at<float>(scale + t * x_bytes));
          _mm256_storeu_ps(to, _mm256_add_ps(_mm256_loadu_ps(to), _mm256_mul_ps(value[t][v], by)));
        });
      }
    }
  }

  template <int64_t kParts>
  inline __attribute__((always_inline)) void take_lows(const char* from, int64_t g, int64_t row,
                                                       __m256 (&value)[kTokens][kSumVectors]) const {
    LaneSums<kTokens> low;
    for_each([&](int t, int v) { low[t][v] = _mm256_setzero_si256(); });
    for (int64_t p = 0; p < kParts / 2; ++p) {
      for_each([&](int t, int v) {
        const __m256i pair = lanes_at(panel.lows[kParts / 2 * g + p] + row + 8 * v);
        low[t][v] = _mm256_add_epi32(low[t][v], _mm256_madd_epi16(pair, four_at(from + t * x_bytes + 4 * p)));
      });
    }
    for_each([&](int t, int v) {
      const __m256 least = _mm256_load_ps(panel.least[g] + row + 8 * v);
      value[t][v] = _mm256_sub_ps(value[t][v], _mm256_mul_ps(_mm256_cvtepi32_ps(low[t][v]), least));
    });
  }

  void add_all() const {
    if (form.parted()) {
      PartPairs minus;
      const char* const part_sums = x + layout.sums() + 4 * (first / form.part);
      const auto add = [&](auto max_code, auto shift) {
        minus.narrow<shift>(part_sums, x_bytes, kTokens, size / form.part);
        add_parts<run_of(max_code), 16, shift, false>(minus);
      };
      if (form.least) {
        if (form.max_code <= 15) return add_parts<run_of(15), 32, 0, true>(minus);
        return add_parts<run_of(31), 32, 0, true>(minus);
      }
      using std::integral_constant;
      if (form.zero == 16) return add(integral_constant<int, 31>(), integral_constant<int, 4>());
      if (form.zero == 32) return add(integral_constant<int, 63>(), integral_constant<int, 5>());
      return add(integral_constant<int, 127>(), integral_constant<int, 6>());
    }
    WordTokens words;
    GroupLows lows;
    if (form.least) {
      lows.widen(x + layout.sums() + 2 * (first / 32), x_bytes, kTokens);
      if (form.max_code <= 15) return add_groups<run_of(15), 32, true>(words, lows);
      return add_groups<run_of(31), 32, true>(words, lows);
    }
    if (form.max_code <= 15) {
      if (form.group == 32) return add_groups<run_of(15), 32, false>(words, lows);
      return add_groups<run_of(15), 0, false>(words, lows);
    }
    if (form.max_code <= 31 && form.group == 32) return add_groups<run_of(31), 32, false>(words, lows);
    words.widen(x + first, x_bytes, kTokens, size);
    if (form.group == 32) return add_groups<0, 32, false>(words, lows);
    add_groups<0, 0, false>(words, lows);
  }
};

template <int kTokens>
void multiply_tile(int64_t tokens, const IntegerForm& form, const IntegerTokens& layout, const Panel& panel,
                   int64_t first, int64_t size, const char* x, int64_t x_bytes, float* sums) {
  if (tokens == kTokens) return PanelTile<kTokens>{form, layout, panel, first, size, x, x_bytes, sums}.add_all();
  if constexpr (kTokens > 1) multiply_tile<kTokens - 1>(tokens, form, layout, panel, first, size, x, x_bytes, sums);
}

// As panel_tile_of, of any number of tokens.
inline void multiply_panel(const IntegerForm& form, const IntegerTokens& layout, const Panel& panel, int64_t first,
                           int64_t size, const char* x, int64_t x_bytes, int64_t tokens, float* sums) {
  const int64_t tiles = (tokens + kSumTokens - 1) / kSumTokens;
  for (int64_t i = 0, begin = 0; i < tiles; ++i) {
    const int64_t end = tokens * (i + 1) / tiles;
    multiply_tile<kSumTokens>(end - begin, form, layout, panel, first, size, x + begin * x_bytes, x_bytes,
                              sums + begin * kUnitRows);
    begin = end;
  }
}

struct Avx2Panels : Avx2Integers {
  static constexpr PanelProducts kPanels = multiply_panel;
};

}  // namespace
}  // namespace moelight
