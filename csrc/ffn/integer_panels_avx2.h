// Tokens rounded to int8 with panels of codes (integers.inl), for AVX2: four tokens and sixteen rows at a time.
// Internal linkage. Sums of whole numbers are exact, so results are those of other lanes to the bit.
//
// `vpmaddubsw` adds two products in sixteen bits, and the sums of kRun columns of narrow codes fit there too. What
// brings them to thirty-two bits multiplies them by the step of their part at once. Codes of eight bits are the signed
// bytes instead, and magnitudes of the token the unsigned ones: where a number is negative, the bits of the code are
// turned, which makes it minus the code, less one; IntegerTokens::turned() makes that good.
#pragma once

#include <utility>

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

  // Of forms without parts. kGroup 0: the form says it.
  template <int64_t kRun, int64_t kGroup, bool kLeast>
  void add_groups(const GroupLows& lows) const {
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
          at.template add_words<std::min<int64_t>(kRun, columns), columns>(i, row, ones, sum);
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
    GroupLows lows;
    if (form.least) {
      lows.widen(x + layout.sums() + 2 * (first / 32), x_bytes, kTokens);
      if (form.max_code <= 15) return add_groups<run_of(15), 32, true>(lows);
      return add_groups<run_of(31), 32, true>(lows);
    }
    if (form.max_code > 15) return add_groups<run_of(31), 32, false>(lows);
    if (form.group == 32) return add_groups<run_of(15), 32, false>(lows);
    add_groups<run_of(15), 0, false>(lows);
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Codes of eight bits: all rows of a panel and two tokens. Codes stay in memory, so that a number of a token is spread
// once for thirty-two rows.

constexpr int kByteTokens = 2, kByteVectors = 4;
static_assert(8 * kByteVectors == kPanelRows);

// body(0) to body(kCount - 1), as constants: sums that a loop counts would stay in memory.
template <int kCount, class F>
inline __attribute__((always_inline)) void in_turn(F&& body) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) __attribute__((always_inline)) {
    (body(std::integral_constant<int, kIndex>()), ...);
  }(std::make_integer_sequence<int, kCount>());
}

using Quad = const char (*)[4];
inline Quad quad_at(const char* p) { return reinterpret_cast<Quad>(p); }

// Adds the products of four columns, in assembly, because gcc 12 loads codes into registers, of which none is left.
inline __attribute__((always_inline)) void add_bytes(Quad magnitudes, Quad masks, const __m256i* codes, __m256i ones,
                                                     __m256i (&sum)[kByteVectors]) {
  __m256i mask, magnitude, turned;
  asm("vpbroadcastd %13, %4\n\tvpbroadcastd %12, %5\n\t"
      "vpxor %8, %4, %6\n\tvpmaddubsw %6, %5, %6\n\tvpmaddwd %7, %6, %6\n\tvpaddd %6, %0, %0\n\t"
      "vpxor %9, %4, %6\n\tvpmaddubsw %6, %5, %6\n\tvpmaddwd %7, %6, %6\n\tvpaddd %6, %1, %1\n\t"
      "vpxor %10, %4, %6\n\tvpmaddubsw %6, %5, %6\n\tvpmaddwd %7, %6, %6\n\tvpaddd %6, %2, %2\n\t"
      "vpxor %11, %4, %4\n\tvpmaddubsw %4, %5, %4\n\tvpmaddwd %7, %4, %4\n\tvpaddd %4, %3, %3"
      : "+x"(sum[0]), "+x"(sum[1]), "+x"(sum[2]), "+x"(sum[3]), "=&x"(mask), "=&x"(magnitude), "=&x"(turned)
      : "x"(ones), "m"(codes[0]), "m"(codes[1]), "m"(codes[2]), "m"(codes[3]), "m"(*magnitudes), "m"(*masks));
}

// As PanelTile. kGroup 0: the form says it.
template <int64_t kGroup, int kTokens>
void add_byte_groups(const IntegerForm form, const IntegerTokens layout, const Panel& panel, int64_t first,
                     int64_t size, const char* x, int64_t x_bytes, float* __restrict sums) {
  const int64_t group = kGroup > 0 ? kGroup : form.group, eights = (size + 7) / 8 * 8;
  const __m256i ones = _mm256_set1_epi16(1);
  const char *magnitudes = x + layout.magnitudes() + first, *masks = x + layout.masks() + first;
  const char *scale = x + layout.scales() + 4 * (first / group), *turned = x + layout.turned() + 4 * (first / group);
  const char* minus = x + layout.sums() + 4 * (first / group);
  const auto* codes = reinterpret_cast<const __m256i*>(panel.codes);
  for (int64_t k = 0, g = 0; k < size; k += group, ++g, scale += 4, turned += 4, minus += 4) {
    __m256i sum[kTokens][kByteVectors];
    in_turn<kTokens>([&](auto t) __attribute__((always_inline)) {
      const __m256i offset = four_at(turned + t * x_bytes);
      in_turn<kByteVectors>([&](auto v) __attribute__((always_inline)) {
        sum[t][v] = offset;
        if (form.zero >= 0) return;
        const __m256i zero = _mm256_sub_epi32(lanes_at(panel.zeros[g] + 8 * v), _mm256_set1_epi32(128));
        sum[t][v] = _mm256_add_epi32(offset, _mm256_mullo_epi32(zero, four_at(minus + t * x_bytes)));
      });
    });
    const auto add = [&]() __attribute__((always_inline)) {
      in_turn<kTokens>([&](auto t) __attribute__((always_inline)) {
        add_bytes(quad_at(magnitudes + t * x_bytes), quad_at(masks + t * x_bytes), codes, ones, sum[t]);
      });
      magnitudes += 4, masks += 4, codes += kByteVectors;
    };
    if (kGroup > 0 && k + kGroup <= size) {
#pragma GCC unroll 8
      for (int i = 0; i < kGroup / 4; ++i) add();
    } else {
      for (int64_t i = k, end = std::min(k + group, eights); i < end; i += 4) add();
    }
    in_turn<kTokens>([&](auto t) __attribute__((always_inline)) {
      const __m256 by = _mm256_set1_ps(number_at<float>(scale + t * x_bytes));
      in_turn<kByteVectors>([&](auto v) __attribute__((always_inline)) {
        float* const to = sums + t * kUnitRows + 8 * v;
        const __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(sum[t][v]), _mm256_load_ps(panel.scales[g] + 8 * v));
        _mm256_storeu_ps(to, _mm256_add_ps(_mm256_loadu_ps(to), _mm256_mul_ps(value, by)));
      });
    });
  }
}

template <int kTokens>
void multiply_tile(int64_t tokens, const IntegerForm& form, const IntegerTokens& layout, const Panel& panel,
                   int64_t first, int64_t size, const char* x, int64_t x_bytes, float* sums) {
  if (tokens == kTokens) return PanelTile<kTokens>{form, layout, panel, first, size, x, x_bytes, sums}.add_all();
  if constexpr (kTokens > 1) multiply_tile<kTokens - 1>(tokens, form, layout, panel, first, size, x, x_bytes, sums);
}

template <int64_t kGroup, int kTokens>
void multiply_byte_tile(int64_t tokens, const IntegerForm& form, const IntegerTokens& layout, const Panel& panel,
                        int64_t first, int64_t size, const char* x, int64_t x_bytes, float* sums) {
  if (tokens == kTokens) return add_byte_groups<kGroup, kTokens>(form, layout, panel, first, size, x, x_bytes, sums);
  if constexpr (kTokens > 1)
    multiply_byte_tile<kGroup, kTokens - 1>(tokens, form, layout, panel, first, size, x, x_bytes, sums);
}

// As panel_tile_of, of any number of tokens.
inline void multiply_panel(const IntegerForm& form, const IntegerTokens& layout, const Panel& panel, int64_t first,
                           int64_t size, const char* x, int64_t x_bytes, int64_t tokens, float* sums) {
  const bool bytes = form.max_code > kMaxNarrowCode;
  const auto multiply = !bytes             ? multiply_tile<kSumTokens>
                        : form.group == 32 ? multiply_byte_tile<32, kByteTokens>
                                           : multiply_byte_tile<0, kByteTokens>;
  const int64_t max_tokens = bytes ? kByteTokens : kSumTokens, tiles = (tokens + max_tokens - 1) / max_tokens;
  for (int64_t i = 0, begin = 0; i < tiles; ++i) {
    const int64_t end = tokens * (i + 1) / tiles;
    multiply(end - begin, form, layout, panel, first, size, x + begin * x_bytes, x_bytes, sums + begin * kUnitRows);
    begin = end;
  }
}

struct Avx2Panels : Avx2Integers {
  static constexpr PanelProducts kPanels = multiply_panel;

  // Magnitudes of numbers, and what turns the bits of unsigned codes into those of signed ones, or of minus those, less
  // one; the sum of the magnitudes of negative numbers.
  static int32_t split(const char* values, int64_t size, char* magnitudes, char* masks) {
    const V sign = _mm256_set1_epi8(static_cast<char>(0x80));
    V sum = zero();
    for (int64_t i = 0; i < size; i += 32) {
      const V x = bytes_at(reinterpret_cast<const uint8_t*>(values + i)), magnitude = _mm256_abs_epi8(x);
      const V negative = _mm256_cmpgt_epi8(zero(), x);
      _mm256_storeu_si256(reinterpret_cast<V*>(magnitudes + i), magnitude);
      _mm256_storeu_si256(reinterpret_cast<V*>(masks + i), _mm256_xor_si256(negative, sign));
      sum = _mm256_add_epi64(sum, _mm256_sad_epu8(_mm256_and_si256(negative, magnitude), zero()));
    }
    return across(sum);
  }
};

}  // namespace
}  // namespace moelight
