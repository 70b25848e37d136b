// How every type of weight becomes operands of bf16 or int16, and how tokens are arranged to meet them. For
// AVX-512 with BF16 and VNNI; internal linkage.
//
// A Stored says: the Lanes that multiply it; kStep elements of K go together; kHead bytes come before a prepared
// token's elements; bytes(k), how far into a row element k is; convert(), one row in one block of K, zeros up to the
// step, as lines of Lanes P, touching what lies `ahead` meanwhile; lines(), the same without zeros and vector by
// vector, for a size that the step divides; arrange(), one token; finish(), what is left to do to sums.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "ffn.h"
#include "pairs.h"

namespace moelight {
namespace {

// Lanes over pairs of int16 with exact sums.
struct Words {
  using V = __m512i;
  using Line = __m512i;
  static constexpr int64_t kLineBytes = 64;
  static V zero() { return _mm512_setzero_si512(); }
  static Line of(__m512i words) { return words; }
  static Line token(__m512i words) { return words; }
  static void store(char* p, Line line) { _mm512_storeu_si512(p, line); }
  static Line load(const char* p) { return _mm512_loadu_si512(p); }
  // In assembly, because gcc 12 keeps sums of the intrinsic in memory.
  static V madd(V sum, __m512i weight, __m512i x) {
    asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(weight), "v"(x));
    return sum;
  }
  static __m512 floats(V sum) { return _mm512_cvtepi32_ps(sum); }
};

inline __mmask32 first_of(int64_t count) { return count >= 32 ? ~__mmask32{0} : (__mmask32{1} << count) - 1; }
inline __m512i load_words(const void* p, int64_t count) { return _mm512_maskz_loadu_epi16(first_of(count), p); }
inline __m256i load_bytes(const void* p, int64_t count) { return _mm256_maskz_loadu_epi8(first_of(count), p); }

struct StoredBf16 {
  using Lanes = Pairs;
  static constexpr int64_t kStep = 32, kHead = 0;
  static constexpr bool kInPlace = true, kGroups = false;
  static int64_t bytes(int64_t element) { return 2 * element; }

  template <class P = Lanes>
  static void convert(const Product& p, int64_t row, int64_t first, int64_t size, const char* ahead, void* out) {
    const char* from = p.weight + row * p.row_bytes + 2 * first;
    auto* to = static_cast<char*>(out);
    for (int64_t k = 0; k < size; k += kStep, from += 64, to += P::kLineBytes, ahead += 64) {
      _mm_prefetch(ahead, _MM_HINT_T0);
      P::store(to, P::of(load_words(from, size - k)));
    }
  }
  template <class F>
  static void lines(const Product& p, int64_t row, int64_t first, int64_t size, const char* ahead, F&& line) {
    const char* from = p.weight + row * p.row_bytes + 2 * first;
    for (const char* const end = from + 2 * size; from < end; from += 64, ahead += 64) {
      _mm_prefetch(ahead, _MM_HINT_T0);
      line(_mm512_loadu_si512(from));
    }
  }
  static void arrange(const Bf16* x, int64_t depth, char* out) {
    for (int64_t k = 0; k < depth; k += kStep) _mm512_storeu_si512(out + 2 * k, load_words(x + k, depth - k));
  }
  static void finish(const Product&, float*) {}
};

// Weights and tokens as int16: a token is its largest power of two that fits times whole numbers, which are within
// 2^-15 of its largest element. Sums of a block are exact: 1024 products of at most 2^22, in sixteen lanes.
struct StoredInt8 {
  using Lanes = Words;
  static constexpr int64_t kStep = 32, kHead = 64;
  static constexpr bool kInPlace = false, kGroups = true;
  static int64_t bytes(int64_t element) { return element; }

  template <class P = Lanes>
  static void convert(const Product& p, int64_t row, int64_t first, int64_t size, const char* ahead, void* out) {
    auto* to = static_cast<char*>(out);
    const int64_t whole = size / kStep * kStep;
    lines(p, row, first, whole, ahead, [&](__m512i words) { _mm512_storeu_si512(to, words), to += 64; });
    const char* const rest = p.weight + row * p.row_bytes + first + whole;
    if (whole < size) _mm512_storeu_si512(to, _mm512_cvtepi8_epi16(load_bytes(rest, size - whole)));
  }
  template <class F>
  static void lines(const Product& p, int64_t row, int64_t first, int64_t size, const char* ahead, F&& line) {
    const char* from = p.weight + row * p.row_bytes + first;
    for (const char* const end = from + size; from < end; from += 32, ahead += 32) {
      _mm_prefetch(ahead, _MM_HINT_T0);
      line(_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
    }
  }

  static void arrange(const Bf16* x, int64_t depth, char* out) {
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);
    __m512i most = _mm512_setzero_si512();
    for (int64_t k = 0; k < depth; k += kStep)
      most = _mm512_max_epi16(most, _mm512_and_si512(load_words(x + k, depth - k), magnitude));
    const __m256i half = _mm256_max_epi16(_mm512_castsi512_si256(most), _mm512_extracti64x4_epi64(most, 1));
    const __m512i wide = _mm512_cvtepi16_epi32(half);
    const int largest = _mm512_reduce_max_epi32(wide), exponent = largest >> 7 > 27 ? largest >> 7 : 27;
    // 2^14 <= largest x factor < 2^15; what is not finite makes the whole token so.
    const float factor = from_bits(static_cast<uint32_t>(254 + 14 - exponent) << 23);
    const float scale = exponent == 255 ? from_bits(0x7fc00000) : from_bits(static_cast<uint32_t>(exponent - 14) << 23);
    std::memset(out, 0, kHead);
    std::memcpy(out, &scale, sizeof scale);
    const __m512 factors = _mm512_set1_ps(exponent == 255 ? 0.0f : factor);
    for (int64_t k = 0; k < depth; k += kStep) {
      const __m512i words = load_words(x + k, depth - k);
      const __m256i low = whole_numbers(_mm512_castsi512_si256(words), factors);
      const __m256i high = whole_numbers(_mm512_extracti64x4_epi64(words, 1), factors);
      _mm512_storeu_si512(out + kHead + 2 * k, _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
    }
  }

  static void finish(const Product& p, float* sums) {
    const bool one = p.group >= p.depth;
    for (int64_t t = 0; t < p.tokens; ++t, sums += kUnitRows) {
      float scale;
      std::memcpy(&scale, p.x + t * p.x_bytes, sizeof scale);
      for (int64_t r = 0; r < p.rows; ++r) sums[r] *= one ? scale * p.scale[r] : scale;
    }
  }

 private:
  static __m256i whole_numbers(__m256i bf16, __m512 factors) {
    const __m512 x = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16));
    return _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(x, factors)));
  }
};

// The scales of a row, for walks along it by steps of 64. Groups are powers of two as a rule: no division then.
struct Scales {
  const float* scale;
  int64_t group, groups;
  int shift;  // log2 of the group, or -1

  Scales(const Product& p, int64_t row)
      : scale(p.scale + row * p.groups),
        group(p.group),
        groups(p.groups),
        shift((p.group & (p.group - 1)) == 0 ? __builtin_ctzll(static_cast<uint64_t>(p.group)) : -1) {}
  int64_t index(int64_t k) const { return groups == 1 ? 0 : shift >= 0 ? k >> shift : k / group; }
  const float* from(int64_t k) const { return scale + std::min(index(k), groups - 1); }
  float at(int64_t k) const { return *from(k); }
  // Whether the sixty-four elements of a step share their scale.
  bool alike() const { return groups == 1 || group % 64 == 0; }
  // The first element after k that has another scale.
  int64_t end(int64_t k) const { return (index(k) + 1) * group; }
};

struct Order {
  uint16_t index[32];
};
constexpr Order every_other(int from) {
  Order order = {};
  for (int i = 0; i < 32; ++i) order.index[i] = static_cast<uint16_t>(2 * i + from);
  return order;
}

// bf16 by a table of the sixteen products with a scale. Sixty-four at a time: first those in the low halves of bytes,
// which are the even ones, then the odd ones, and tokens the same.
struct StoredInt4 {
  using Lanes = Pairs;
  static constexpr int64_t kStep = 64, kHead = 0;
  static constexpr bool kInPlace = false, kGroups = false;
  static int64_t bytes(int64_t element) { return element / 2; }

  template <class P = Lanes>
  static void convert(const Product& p, int64_t row, int64_t first, int64_t size, const char* ahead, void* out) {
    auto* to = static_cast<char*>(out);
    const auto store = [&](__m512i line) { _mm512_storeu_si512(to, line), to += 64; };
    const int64_t whole = first + size / kStep * kStep, end = first + size;
    lines(p, row, first, whole - first, ahead, store);
    const char* const rest = p.weight + row * p.row_bytes + whole / 2;
    if (whole < end) expand(load_bytes(rest, (end - whole) / 2), products(Scales(p, row), whole), store);
  }
  template <class F>
  static void lines(const Product& p, int64_t row, int64_t first, int64_t size, const char* ahead, F&& line) {
    const Scales scales(p, row);
    const char* from = p.weight + row * p.row_bytes + first / 2;
    const int64_t end = first + size;
    const auto expand_to = [&](__m512i table, int64_t k, int64_t stop) {
      for (; k < stop; k += kStep, from += 32, ahead += 32) {
        _mm_prefetch(ahead, _MM_HINT_T0);
        expand(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), table, line);
      }
    };
    if (!scales.alike()) {
      for (int64_t k = first; k < end; k += kStep) expand_to(products(scales, k), k, k + kStep);
      return;
    }
    const float* scale = scales.from(first);
    int64_t stop = scales.end(first);
    for (int64_t k = first; k < end; k = stop, stop += scales.group, ++scale) {
      const __m512i table = twice(products(*scale));
      expand_to(table, k, std::min(stop, end));
    }
  }

  static void arrange(const Bf16* x, int64_t depth, char* out) {
    alignas(64) static constexpr auto kEven = every_other(0), kOdd = every_other(1);
    const __m512i even = _mm512_load_si512(kEven.index), odd = _mm512_load_si512(kOdd.index);
    for (int64_t k = 0; k < depth; k += kStep) {
      const __m512i a = load_words(x + k, depth - k);
      const __m512i b = depth - k > 32 ? load_words(x + k + 32, depth - k - 32) : _mm512_setzero_si512();
      _mm512_storeu_si512(out + 2 * k, _mm512_permutex2var_epi16(a, even, b));
      _mm512_storeu_si512(out + 2 * k + 64, _mm512_permutex2var_epi16(a, odd, b));
    }
  }
  static void finish(const Product&, float*) {}

 private:
  static __m256i products(float scale) {
    const __m512 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    return (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(values, _mm512_set1_ps(scale)));
  }
  // Sixteen entries for the first thirty-two elements from k on, and as many for the others.
  static __m512i products(const Scales& scales, int64_t k) {
    const __m256i first = products(scales.at(k));
    const __m256i second = scales.alike() ? first : products(scales.at(k + 32));
    return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
  }
  static __m512i twice(__m256i table) { return _mm512_inserti64x4(_mm512_castsi256_si512(table), table, 1); }
  template <class F>
  static void expand(__m256i bytes, __m512i table, F&& line) {
    const __m512i upper = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
    const __m512i two = _mm512_cvtepu8_epi16(bytes);
    const __m512i even = _mm512_or_si512(_mm512_and_si512(two, _mm512_set1_epi16(15)), upper);
    const __m512i odd = _mm512_or_si512(_mm512_srli_epi16(two, 4), upper);
    line(_mm512_permutexvar_epi16(even, table));
    line(_mm512_permutexvar_epi16(odd, table));
  }
};

}  // namespace
}  // namespace moelight
