// The same layouts for bf16 products in pairs (AVX512_BF16): a word is two neighbours of a head, or one lane of two
// neighbouring keys. Include only from a file compiled with -mavx512bf16.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "lanes_avx512.h"
#include "prefill.h"
#include "product.h"

namespace moelight {
namespace {

// For a permutation of two rows of bf16: the elements [from, from + 16) of both, side by side.
struct RowOrder {
  uint16_t index[32];
};

constexpr RowOrder row_order(int from) {
  RowOrder order = {};
  for (int i = 0; i < 16; ++i) {
    order.index[2 * i] = static_cast<uint16_t>(from + i);
    order.index[2 * i + 1] = static_cast<uint16_t>(32 + from + i);
  }
  return order;
}

struct Dots {
  using Lanes = PrefillAvx512;
  using Stored = Bf16;
  using V = __m512;
  static constexpr int64_t kUnit = 32;
  static constexpr int64_t kKeysPerWord = 2;

  static V multiply_add(V a, V b, V sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
  }

  static int64_t depth(int64_t head_dim) { return (head_dim + kUnit - 1) / kUnit * 16; }
  static int64_t lanes(int64_t head_dim) { return (head_dim + kUnit - 1) / kUnit * kUnit; }

  static void pack_query(const Bf16* q, int64_t head_dim, float* words) {
    for (int64_t d = 0; d < head_dim; d += kUnit) _mm512_storeu_si512(words + d / 2, load(q + d, head_dim - d));
  }

  static void pack_keys(const Bf16* const* rows, int64_t head_dim, float*, float* words) {
    for (int64_t d = 0; d < head_dim; d += kUnit) {
      __m512i x[16];
      for (int i = 0; i < 16; ++i) x[i] = load(rows[i] + d, head_dim - d);
      transpose16(x, words + d / 2 * kKeyBlock, kKeyBlock);
    }
  }

  // words[pair of keys][lane]; an odd last key pairs with itself, and weighs nothing there.
  static void pack_values(const Bf16* const* rows, int64_t count, int64_t head_dim, float* words) {
    alignas(64) static constexpr RowOrder kLow = row_order(0), kHigh = row_order(16);
    const __m512i low = _mm512_load_si512(kLow.index), high = _mm512_load_si512(kHigh.index);
    const int64_t stride = lanes(head_dim);
    for (int64_t i = 0; i < count; i += 2, words += stride) {
      const Bf16 *first = rows[i], *second = rows[i + 1 < count ? i + 1 : i];
      for (int64_t d = 0; d < head_dim; d += kUnit) {
        const __m512i a = load(first + d, head_dim - d), b = load(second + d, head_dim - d);
        _mm512_storeu_si512(words + d, _mm512_permutex2var_epi16(a, low, b));
        _mm512_storeu_si512(words + d + 16, _mm512_permutex2var_epi16(a, high, b));
      }
    }
  }

  static void pack_weights(V a, V b, float* words, int64_t i) { _mm512_storeu_si512(words + i / 2, narrow(a, b)); }

  static void finish(const float* sums, V factor, int64_t head_dim, Bf16* out) {
    for (int64_t d = 0; d < head_dim; d += kUnit) {
      const V a = _mm512_mul_ps(_mm512_loadu_ps(sums + d), factor);
      const V b = _mm512_mul_ps(_mm512_loadu_ps(sums + d + 16), factor);
      _mm512_mask_storeu_epi16(out + d, first(head_dim - d), narrow(a, b));
    }
  }

 private:
  static __mmask32 first(int64_t count) { return count >= 32 ? ~__mmask32{0} : (__mmask32{1} << count) - 1; }
  static __m512i load(const Bf16* p, int64_t count) { return _mm512_maskz_loadu_epi16(first(count), p); }
  static __m512i narrow(V a, V b) { return (__m512i)_mm512_cvtne2ps_pbh(b, a); }
};

}  // namespace
}  // namespace moelight
