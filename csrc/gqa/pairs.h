// The same products of sixteen-bit pairs, two to a 32-bit lane (floats.h says what is asked of them): bf16 as it is
// stored (AVX512_BF16), int8 widened beside queries and weights of sixteen bits (AVX512_VNNI), whose sums are whole
// numbers and exact. Include only from a file compiled with both.
#pragma once

#include <cstring>
#include <type_traits>

#include "ahead.h"
#include "lanes_avx512.h"
#include "softmax.inl"

namespace moelight {
namespace {

// Asks for a line between the load of x and its use: compilers gather prefetches that nothing ties.
inline __m512i beside(__m512i x, const Prefetch& ahead, int64_t byte) {
  asm volatile("prefetcht0 %1" : "+v"(x) : "m"(ahead.at[byte]));
  return x;
}
inline __m512i beside(__m512i x, const NoPrefetch&, int64_t) { return x; }

inline __mmask32 first_of_unit(int64_t count) { return count >= 32 ? ~__mmask32{0} : (__mmask32{1} << count) - 1; }

struct Bf16Pairs {
  using Stored = Bf16;
  using Sum = __m512;

  static __m512i load(const Bf16* p) { return _mm512_loadu_si512(p); }
  static __m512i load(const Bf16* p, __mmask32 mask) { return _mm512_maskz_loadu_epi16(mask, p); }
  static Sum multiply_add(__m512i x, __m512i y, Sum sum) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)y); }
  static Sum zero() { return _mm512_setzero_ps(); }
  static __m512 to_float(Sum sum) { return sum; }
  static __m512 as_float(Sum sum) { return sum; }
  static Sum from_float(__m512 x) { return x; }
  static Sum add(Sum x, Sum y) { return _mm512_add_ps(x, y); }

  static float pack_query(const Bf16* q, int64_t head_dim, uint16_t* words) {
    for (int64_t d = 0; d < head_dim; d += 32) _mm512_storeu_si512(words + d, load(q + d, first_of_unit(head_dim - d)));
    return 1.0f;
  }
  // The sum is that of the rounded weights, so that a rounding common to all does not show.
  static float pack_weights(float* weights, int64_t count, const float*, float& total) {
    auto* words = reinterpret_cast<uint16_t*>(weights);
    __m512 sum = zero();
    for (int64_t i = 0; i < count; i += 32) {
      const __m512 a = _mm512_loadu_ps(weights + i), b = _mm512_loadu_ps(weights + i + 16);
      const __m512i pair = (__m512i)_mm512_cvtne2ps_pbh(b, a);
      sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16)));
      sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32(-65536))));
      _mm512_storeu_si512(words + i, pair);
    }
    total = _mm512_reduce_add_ps(sum);
    return 1.0f;
  }
};

// Sixteen bits and a factor for a row of floats: an error of 2^-16 of the row's largest.
class Rounder {
 public:
  void meet(__m512 x) {
    const __m512 magnitude = _mm512_abs_ps(x);
    largest_ = _mm512_max_ps(largest_, magnitude), poison_ = _mm512_fmadd_ps(x, _mm512_setzero_ps(), poison_);
  }
  void end() {
    const float largest = _mm512_reduce_max_ps(largest_);
    factor_ = largest / 32767.0f + _mm512_reduce_add_ps(poison_);
    inverse_ = _mm512_set1_ps(largest > 1e-30f ? 32767.0f / largest : 0.0f);
  }
  // Not a number if any x was not finite.
  float factor() const { return factor_; }
  __m256i operator()(__m512 x) const { return _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(x, inverse_))); }

 private:
  __m512 largest_ = _mm512_setzero_ps(), poison_ = _mm512_setzero_ps(), inverse_ = _mm512_setzero_ps();
  float factor_ = 0.0f;
};

// No sum overflows: the products of a chunk's kChunk tokens, as those of a head, are below 2^31 / 512 each.
struct IntPairs {
  using Stored = int8_t;
  using Sum = __m512i;
  static_assert(kChunk * 128 * 32767 < (int64_t{1} << 31));

  static __m512i load(const int8_t* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static __m512i load(const int8_t* p, __mmask32 mask) {
    return _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(mask, p));
  }
  static Sum multiply_add(__m512i x, __m512i y, Sum sum) { return _mm512_dpwssd_epi32(sum, x, y); }
  static Sum zero() { return _mm512_setzero_si512(); }
  static __m512 to_float(Sum sum) { return _mm512_cvtepi32_ps(sum); }
  static __m512 as_float(Sum sum) { return _mm512_castsi512_ps(sum); }
  static Sum from_float(__m512 x) { return _mm512_castps_si512(x); }
  static Sum add(Sum x, Sum y) { return _mm512_add_epi32(x, y); }

  template <class Q>
  static float pack_query(const Q* q, int64_t head_dim, uint16_t* words) {
    float wide[kMaxHeadDim];
    Rounder rounder;
    for (int64_t d = 0; d < head_dim; d += 32) {
      __m512 a, b;
      if (head_dim - d >= 32) {
        LanesAvx512::load2(q + d, a, b);
      } else {
        LanesAvx512::load2_part(q + d, head_dim - d, a, b);
      }
      LanesAvx512::straighten<Q>(a, b);
      _mm512_storeu_ps(wide + d, a), _mm512_storeu_ps(wide + d + 16, b);
      rounder.meet(a), rounder.meet(b);
    }
    rounder.end();
    for (int64_t d = 0; d < head_dim; d += 32) {
      store(words + d, rounder(_mm512_loadu_ps(wide + d)));
      store(words + d + 16, rounder(_mm512_loadu_ps(wide + d + 16)));
    }
    return rounder.factor();
  }
  static float pack_weights(float* weights, int64_t count, const float* value_scales, float&) {
    auto* words = reinterpret_cast<uint16_t*>(weights);
    Rounder rounder;
    for (int64_t i = 0; i < count; i += 16) {
      const __m512 x = _mm512_mul_ps(_mm512_loadu_ps(weights + i), _mm512_loadu_ps(value_scales + i));
      rounder.meet(x);
      _mm512_storeu_ps(weights + i, x);
    }
    rounder.end();
    for (int64_t i = 0; i < count; i += 16) store(words + i, rounder(_mm512_loadu_ps(weights + i)));
    return rounder.factor();
  }

 private:
  static void store(uint16_t* to, __m256i words) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), words); }
};

template <class P, class Q>
struct PairProducts {
  using Lanes = LanesAvx512;
  using Query = Q;
  using Stored = typename P::Stored;
  using T = Stored;
  using Word = uint16_t;
  using Sum = typename P::Sum;
  static constexpr int kHeadTile = 4, kWeighedHeads = 4;

  static float pack_query(const Q* q, int64_t head_dim, Word* words) { return P::pack_query(q, head_dim, words); }

  template <int kHeads, class A>
  static void score(const T* const (&row)[kKeys], const Word* q, int64_t head_dim, float* scores, const A& ahead) {
    if (head_dim == kUsualDim) {
      score_rows<kHeads, true>(row, q, std::integral_constant<int64_t, kUsualDim>{}, scores, ahead);
    } else if (head_dim % 32 == 0) {
      score_rows<kHeads, true>(row, q, head_dim, scores, ahead);
    } else {
      score_rows<kHeads, false>(row, q, head_dim, scores, ahead);
    }
  }

  static float pack_weights(float* weights, int64_t count, const float* value_scales, float& total) {
    return P::pack_weights(weights, count, value_scales, total);
  }

  template <int kHeads, class N>
  static void weigh(const T* rows, int64_t count, const Word* weights, int64_t head_dim, float* values, N&& next) {
    WeightTile tile = {rows, head_dim, 0, weights, values, padded<Lanes>(head_dim)};
    for (int64_t left = count / 2 * 2; left > 0; left -= tile.count) {
      tile.count = left < kTileRows ? left : kTileRows;
      weigh_tile<kHeads, true>(tile, next);
      tile.rows += tile.count * head_dim, tile.weights += tile.count;
    }
    tile.count = 1;
    if (count % 2 != 0) weigh_tile<kHeads, false>(tile, next);
  }

  static void finish(float* values, int64_t count, float factor) {
    if constexpr (std::is_same_v<P, IntPairs>)
      for (int64_t i = 0; i < count; i += 16)
        _mm512_storeu_ps(
            values + i, _mm512_mul_ps(P::to_float(P::from_float(_mm512_loadu_ps(values + i))), _mm512_set1_ps(factor)));
  }

  // Sums lie in the order in which two rows were interleaved: four columns in the one vector, four in the other.
  static void write(Q* out, int64_t left, __m512 a, __m512 b) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    __m512 x = _mm512_permutex2var_ps(a, low, b), y = _mm512_permutex2var_ps(a, high, b);
    Lanes::bend<Q>(x, y);
    if (left >= 32) {
      Lanes::store2(out, x, y);
    } else {
      Lanes::store2_part(out, left, x, y);
    }
  }

 private:
  static constexpr int64_t kUsualDim = 128;
  // Few enough for the part of a row that is summed first not to overtake what was fetched.
  static constexpr int64_t kTileRows = 16;

  static Sum low(Sum x, Sum y) { return P::from_float(_mm512_unpacklo_ps(P::as_float(x), P::as_float(y))); }
  static Sum high(Sum x, Sum y) { return P::from_float(_mm512_unpackhi_ps(P::as_float(x), P::as_float(y))); }
  template <int kLanes>
  static Sum shuffle(Sum x, Sum y) {
    return P::from_float(_mm512_shuffle_ps(P::as_float(x), P::as_float(y), kLanes));
  }
  template <int kQuarters>
  static Sum turn(Sum x) {
    return P::from_float(_mm512_shuffle_f32x4(P::as_float(x), P::as_float(x), kQuarters));
  }
  // Each quarter a share of the sums of x[0..4).
  static Sum quarters(const Sum (&x)[kKeys]) {
    const Sum ab = P::add(low(x[0], x[1]), high(x[0], x[1])), cd = P::add(low(x[2], x[3]), high(x[2], x[3]));
    return P::add(shuffle<0x44>(ab, cd), shuffle<0xee>(ab, cd));
  }
  // out[h][k] = the sum of the lanes of x[h][k]
  template <int kHeads>
  static void store_sums(const Sum (&x)[kHeads][kKeys], float* out) {
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) {
      const Sum all = quarters(x[h]);
      const Sum half = P::add(all, turn<0x4e>(all));
      _mm_storeu_ps(out + h * kScoreRow, _mm512_castps512_ps128(P::to_float(P::add(half, turn<0xb1>(half)))));
    }
  }

  // Rows one after the other, so that memory is read in its order. Dim: of a known head the loops vanish.
  template <int kHeads, bool kFull, class Dim, class A>
  static void score_rows(const T* const (&row)[kKeys], const Word* q, Dim head_dim, float* scores, const A& ahead) {
    Sum sum[kHeads][kKeys];
    const int64_t stride = padded<Lanes>(head_dim);
#pragma GCC unroll 4
    for (int k = 0; k < kKeys; ++k) {
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h) sum[h][k] = P::zero();
      for (int64_t d = 0; d < head_dim; d += 32) {
        constexpr auto kBytes = static_cast<int64_t>(sizeof(T));
        __m512i x = kFull ? P::load(row[k] + d) : P::load(row[k] + d, first_of_unit(head_dim - d));
        if (d * kBytes % kLineBytes == 0) x = beside(x, ahead, (k * head_dim + d) * kBytes);
#pragma GCC unroll 4
        for (int h = 0; h < kHeads; ++h)
          sum[h][k] = P::multiply_add(x, _mm512_loadu_si512(q + h * stride + d), sum[h][k]);
      }
    }
    store_sums<kHeads>(sum, scores);
  }

  struct WeightTile {
    const T* rows;
    int64_t head_dim, count;
    const Word* weights;
    float* values;
    int64_t stride;
  };

  template <int kHeads, bool kPaired, class N>
  static void weigh_tile(const WeightTile& tile, N& next) {
    int64_t d = 0;
    if constexpr (kHeads <= 2)
      for (; d + 128 <= tile.head_dim; d += 128) weigh_columns<kHeads, 4, true, kPaired>(tile, d, next);
    for (; d + 64 <= tile.head_dim; d += 64) weigh_columns<kHeads, 2, true, kPaired>(tile, d, next);
    for (; d < tile.head_dim; d += 32) weigh_columns<kHeads, 1, false, kPaired>(tile, d, next);
  }

  // kUnits units from column d on. An odd last row is paired with zeros.
  template <int kHeads, int kUnits, bool kFull, bool kPaired, class N>
  static void weigh_columns(const WeightTile& tile, int64_t d, N& next) {
    Sum sum[kHeads][2 * kUnits];
    float* const values = tile.values + d;
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h)
#pragma GCC unroll 8
      for (int u = 0; u < 2 * kUnits; ++u)
        sum[h][u] = P::from_float(_mm512_loadu_ps(values + h * tile.stride + u * 16));
    const __mmask32 mask = first_of_unit(tile.head_dim - d);
    const auto load = [mask](const T* p) { return kFull ? P::load(p) : P::load(p, mask); };
    const T* at = tile.rows + d;
    for (int64_t i = 0; i < tile.count; i += 2, at += 2 * tile.head_dim) {
      constexpr int64_t kBytes = 2 * 32 * static_cast<int64_t>(sizeof(T));
      const auto ahead = next.take(kUnits * kBytes);
      __m512i w[kHeads];
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h) {
        int32_t pair;
        std::memcpy(&pair, tile.weights + 2 * h * kScoreRow + i, sizeof pair);
        w[h] = _mm512_set1_epi32(pair);
      }
#pragma GCC unroll 4
      for (int u = 0; u < kUnits; ++u) {
        const __m512i a = beside(load(at + 32 * u), ahead, u * kBytes);
        __m512i b = kPaired ? load(at + tile.head_dim + 32 * u) : _mm512_setzero_si512();
        if constexpr (kBytes > kLineBytes) b = beside(b, ahead, u * kBytes + kLineBytes);
        const __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
#pragma GCC unroll 4
        for (int h = 0; h < kHeads; ++h) {
          sum[h][2 * u] = P::multiply_add(low, w[h], sum[h][2 * u]);
          sum[h][2 * u + 1] = P::multiply_add(high, w[h], sum[h][2 * u + 1]);
        }
      }
    }
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h)
#pragma GCC unroll 8
      for (int u = 0; u < 2 * kUnits; ++u) _mm512_storeu_ps(values + h * tile.stride + u * 16, P::as_float(sum[h][u]));
  }
};

}  // namespace
}  // namespace moelight
