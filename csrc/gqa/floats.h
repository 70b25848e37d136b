// Products of decode attention in float32, over a SIMD type S (lanes_*.h); Q is the type of queries and output, T that
// of the cache: Q itself, or int8_t. Internal linkage.
//
// What kernel.inl asks of products: a packed query and weights are Words; a packed query has its head padded with zeros
// to whole units; the order of the sums' columns is that of S::load2 of a T ("packed order"), undone by `write`.
#pragma once

#include <algorithm>
#include <type_traits>

#include "ahead.h"
#include "softmax.inl"

namespace moelight {
namespace {

template <class S, class Q, class T>
struct FloatProducts {
  using Lanes = S;
  using Query = Q;
  using Stored = T;
  using Word = float;
  using V = typename S::V;
  static constexpr int kHeadTile = S::kScoredHeads, kWeighedHeads = S::kWeighedHeads;

  // What raw scores must be multiplied by.
  static float pack_query(const Q* q, int64_t head_dim, Word* packed) {
    const int64_t full = head_dim / kUnit<S> * kUnit<S>;
    for (int64_t d = 0; d < head_dim; d += kUnit<S>, packed += kUnit<S>) {
      V a, b;
      load_unit(q + d, d < full, head_dim - d, a, b);
      if constexpr (!std::is_same_v<Q, T>) S::template straighten<Q>(a, b);
      S::store(packed, a), S::store(packed + S::kWidth, b);
    }
    return 1.0f;
  }

  // scores[h][0..4) = q[h] . row[0..4)
  template <int kHeads, class A>
  static void score(const T* const (&row)[kKeys], const Word* q, int64_t head_dim, float* scores, const A& ahead) {
    if (head_dim % kUnit<S> == 0) {
      score_rows<kHeads, true>(row, q, head_dim, scores, ahead);
    } else {
      score_rows<kHeads, false>(row, q, head_dim, scores, ahead);
    }
  }

  // The weights of a head become words in place: times the scales of int8 values, and in float32 nothing else. Returns
  // what the weighted sums must be multiplied by.
  static float pack_weights(float* weights, int64_t count, const float* value_scales, float&) {
    if constexpr (std::is_same_v<T, int8_t>)
      for (int64_t i = 0; i < count; i += S::kWidth)
        S::store(weights + i, S::mul(S::load(weights + i), S::load(value_scales + i)));
    return 1.0f;
  }

  // values[h] += weights[h] . rows
  template <int kHeads, class N>
  static void weigh(const T* rows, int64_t count, const Word* weights, int64_t head_dim, float* values, N&& next) {
    const int64_t full = head_dim / kUnit<S> * kUnit<S>;
    const WeightTile tile = {rows, head_dim, count, weights, values, padded<S>(head_dim)};
    int64_t d = 0;
    for (; d + kColumns <= full; d += kColumns) weigh_columns<kHeads, S::kWeighedUnits, true>(tile, d, 0, next);
    for (; d < full; d += kUnit<S>) weigh_columns<kHeads, 1, true>(tile, d, 0, next);
    if (d < head_dim) weigh_columns<kHeads, 1, false>(tile, d, head_dim - d, next);
  }

  static void finish(float*, int64_t, float) {}

  // A unit of sums, or what is left of the last one.
  static void write(Q* out, int64_t left, V a, V b) {
    if constexpr (!std::is_same_v<Q, T>) S::template bend<Q>(a, b);
    if (left >= kUnit<S>) {
      S::store2(out, a, b);
    } else {
      S::store2_part(out, left, a, b);
    }
  }

 private:
  static constexpr int64_t kColumns = S::kWeighedUnits * kUnit<S>;

  struct WeightTile {
    const T* rows;
    int64_t head_dim, count;
    const Word* weights;
    float* values;
    int64_t stride;
  };

  template <class E>
  static void load_unit(const E* p, bool complete, int64_t rest, V& a, V& b) {
    if (complete) {
      S::load2(p, a, b);
    } else {
      S::load2_part(p, rest, a, b);
    }
  }

  // Rows one after the other, or S::kScoredRows side by side, so that memory is read in its order. kWhole where
  // head_dim is made of whole units: with a second path to its end the sums would not stay in registers.
  template <int kHeads, bool kFull, class A>
  static void score_rows(const T* const (&row)[kKeys], const Word* q, int64_t head_dim, float* scores, const A& ahead) {
    constexpr int kSide = S::kScoredRows;
    V sum[kHeads][kKeys];
    const int64_t full = head_dim / kUnit<S> * kUnit<S>, stride = padded<S>(head_dim);
    const int64_t row_bytes = head_dim * static_cast<int64_t>(sizeof(T));
#pragma GCC unroll 4
    for (int k = 0; k < kKeys; k += kSide) {
      const auto step = [&](int64_t d, auto complete) {
        V a[kSide], b[kSide];
#pragma GCC unroll 2
        for (int i = 0; i < kSide; ++i) load_unit(row[k + i] + d, complete, head_dim - full, a[i], b[i]);
#pragma GCC unroll 4
        for (int h = 0; h < kHeads; ++h) {
          const V even = S::load(q + h * stride + d), odd = S::load(q + h * stride + d + S::kWidth);
#pragma GCC unroll 2
          for (int i = 0; i < kSide; ++i) sum[h][k + i] = S::fma(b[i], odd, S::fma(a[i], even, sum[h][k + i]));
        }
      };
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h)
#pragma GCC unroll 2
        for (int i = 0; i < kSide; ++i) sum[h][k + i] = S::zero();
      for (int64_t i = 0; i < kSide * row_bytes; i += kLineBytes) ahead(k * row_bytes + i);
      for (int64_t d = 0; d < full; d += kUnit<S>) step(d, std::true_type{});
      if constexpr (!kFull) step(full, std::false_type{});
    }
    for (int h = 0; h < kHeads; ++h) S::sum4(sum[h][0], sum[h][1], sum[h][2], sum[h][3], scores + h * kScoreRow);
  }

  // kUnits units from column d on; the last unit of a row may have a `rest` only.
  template <int kHeads, int kUnits, bool kFull, class N>
  static void weigh_columns(const WeightTile& tile, int64_t d, int64_t rest, N& next) {
    V sum[kHeads][2 * kUnits];
    float* const values = tile.values + d;
    for (int h = 0; h < kHeads; ++h)
      for (int u = 0; u < 2 * kUnits; ++u) sum[h][u] = S::load(values + h * tile.stride + u * S::kWidth);
    const T* at = tile.rows + d;
    const int64_t bytes = (kFull ? kUnits * kUnit<S> : rest) * static_cast<int64_t>(sizeof(T));
    const auto add = [&](int64_t i) __attribute__((always_inline)) {
      V row[2 * kUnits];
      for (int u = 0; u < kUnits; ++u) load_unit(at + u * kUnit<S>, kFull, rest, row[2 * u], row[2 * u + 1]);
      for (int h = 0; h < kHeads; ++h) {
        const V weight = S::set(tile.weights[h * kScoreRow + i]);
        for (int u = 0; u < 2 * kUnits; ++u) sum[h][u] = S::fma(row[u], weight, sum[h][u]);
      }
      at += tile.head_dim;
    };
    // As many rows as have a line among them.
    constexpr int64_t kLine = std::max<int64_t>(1, kLineBytes / (kUnits * kUnit<S> * static_cast<int64_t>(sizeof(T))));
    int64_t i = 0;
    for (; i + kLine <= tile.count; i += kLine) {
      const auto ahead = next.take(kLine * bytes);
      for (int64_t j = 0; j < kLine * bytes; j += kLineBytes) ahead(j);
#pragma GCC unroll 4
      for (int64_t r = 0; r < kLine; ++r) add(i + r);
    }
    for (; i < tile.count; ++i) next.take(bytes)(0), add(i);
    for (int h = 0; h < kHeads; ++h)
      for (int u = 0; u < 2 * kUnits; ++u) S::store(values + h * tile.stride + u * S::kWidth, sum[h][u]);
  }
};

}  // namespace
}  // namespace moelight
