// The one algorithm of decode attention, over a SIMD type S (lanes_*.h). Included once by each instruction set's file;
// all of it has internal linkage. Two sweeps over a chunk: keys into scores, then, after the softmax, values into sums.
// Both read memory once, in order, and are bound by that: the lead fetches while they compute.
//
// Q is the type of queries and output, T that of the cache: Q itself, or int8_t. Queries and sums are kept in the
// packed order (softmax.inl) of T. The scale of an int8 key multiplies its scores, that of a value its weights.

#include <cstring>
#include <type_traits>

#include "gqa.h"
#include "lead.h"
#include "quantise.inl"
#include "softmax.inl"

namespace moelight {
namespace {

constexpr int kKeys = 4;            // keys per register tile of the score sweep
constexpr int64_t kValueTile = 32;  // rows of V that stay in the first-level cache while the heads pass over them

template <class S, class Q, class T>
void pack_queries(const Q* q, int64_t heads, int64_t head_dim, float scale, float* packed) {
  const int64_t full = head_dim / kUnit<S> * kUnit<S>;
  const auto factor = S::set(scale);
  for (int64_t h = 0; h < heads; ++h, q += head_dim) {
    for (int64_t d = 0; d < head_dim; d += kUnit<S>, packed += kUnit<S>) {
      typename S::V a, b;
      if (d < full) {
        S::load2(q + d, a, b);
      } else {
        S::load2_part(q + d, head_dim - d, a, b);
      }
      if constexpr (!std::is_same_v<Q, T>) S::template straighten<Q>(a, b);
      S::store(packed, S::mul(a, factor));
      S::store(packed + S::kWidth, S::mul(b, factor));
    }
  }
}

// A unit of a row, or what is left of the last one.
template <class S, bool kWhole, class T>
void load_unit(const T* p, int64_t rest, typename S::V& a, typename S::V& b) {
  if constexpr (kWhole) {
    S::load2(p, a, b);
  } else {
    S::load2_part(p, rest, a, b);
  }
}

// scores[h][0..4) = q[h] . row[0..4); kWhole where head_dim is made of whole units: with a second path to its end the
// sums would not stay in registers.
template <class S, class T, bool kWhole, int kHeads, class L>
void score_tile(const T* const (&row)[kKeys], const float* q, int64_t head_dim, float* scores, L& lead) {
  typename S::V sum[kHeads][kKeys];
  for (int h = 0; h < kHeads; ++h)
    for (int k = 0; k < kKeys; ++k) sum[h][k] = S::zero();
  const int64_t full = head_dim / kUnit<S> * kUnit<S>, stride = padded<S>(head_dim);
  L ahead = lead;
  auto step = [&](int64_t d, auto whole) {
    typename S::V a[kKeys], b[kKeys];
    for (int k = 0; k < kKeys; ++k) load_unit<S, whole>(row[k] + d, head_dim - full, a[k], b[k]);
    if constexpr (whole) {
      ahead.template pass<kKeys * kUnit<S> * sizeof(T)>();
    } else {
      ahead.pass(kKeys * (head_dim - full) * static_cast<int64_t>(sizeof(T)));
    }
    for (int h = 0; h < kHeads; ++h) {
      const auto qa = S::load(q + h * stride + d), qb = S::load(q + h * stride + d + S::kWidth);
      for (int k = 0; k < kKeys; ++k) sum[h][k] = S::fma(b[k], qb, S::fma(a[k], qa, sum[h][k]));
    }
  };
  if constexpr (kWhole) {
    int64_t d = 0;
    do {
      step(d, std::true_type{});
    } while ((d += kUnit<S>) < full);
  } else {
    for (int64_t d = 0; d < full; d += kUnit<S>) step(d, std::true_type{});
    step(full, std::false_type{});
  }
  lead = ahead;
  for (int h = 0; h < kHeads; ++h) S::sum4(sum[h][0], sum[h][1], sum[h][2], sum[h][3], scores + h * kScoreRow);
}

// All heads of the group, tile by tile; the first tile brings the rows into the cache and moves the lead.
template <class S, class T, bool kWhole, int kHeads = S::kHeadTile, class L>
void score_heads(const T* const (&row)[kKeys], const float* q, int64_t heads, int64_t head_dim, float* scores,
                 L& lead) {
  if (heads >= kHeads) {
    score_tile<S, T, kWhole, kHeads>(row, q, head_dim, scores, lead);
    NoLead none;
    const int64_t rest = heads - kHeads;
    if (rest > 0)
      score_heads<S, T, kWhole, kHeads>(row, q + kHeads * padded<S>(head_dim), rest, head_dim,
                                        scores + kHeads * kScoreRow, none);
  } else if constexpr (kHeads > 1) {
    score_heads<S, T, kWhole, kHeads - 1>(row, q, heads, head_dim, scores, lead);
  }
}

// A short last tile repeats its last row; what it writes beyond the run is overwritten by the next run or by the
// softmax's padding, and at the end of a chunk falls into the row's slack.
template <class S, class T>
void score_run(const Run& run, const float* q, int64_t heads, int64_t head_dim, float* scores, Lead& lead) {
  const auto* rows = reinterpret_cast<const T*>(run.rows);
  for (int64_t i = 0; i < run.count; i += kKeys) {
    const T* row[kKeys];
    for (int64_t j = 0; j < kKeys; ++j) row[j] = rows + (i + j < run.count ? i + j : run.count - 1) * head_dim;
    if (head_dim % kUnit<S> == 0) {
      score_heads<S, T, true>(row, q, heads, head_dim, scores + i, lead);
    } else {
      score_heads<S, T, false>(row, q, heads, head_dim, scores + i, lead);
    }
  }
}

// Raw products of one head into base-2 logits, beyond what the queries were multiplied by: each key's scale, the cap.
template <class S>
void finish_scores(float* scores, int64_t count, const float* key_scales, float softcap) {
  const auto cap = S::set(softcap * kLog2E);
  for (int64_t i = 0; i < count; i += S::kWidth) {
    auto x = S::load(scores + i);
    if (key_scales != nullptr) x = S::mul(x, S::load(key_scales + i));
    if (softcap > 0.0f) x = S::mul(tanh<S>(x), cap);
    S::store(scores + i, x);
  }
}

// Turns the first `count` logits of a head into weights relative to their maximum, and those into factors of the
// stored values by their scales; returns maximum and sum of weights.
template <class S>
void softmax(float* scores, int64_t count, const float* value_scales, float& maximum, float& total) {
  const int64_t whole = whole_vectors<S>(count);
  for (int64_t i = count; i < whole; ++i) scores[i] = -kInfinity;
  auto top = S::load(scores);
  for (int64_t i = S::kWidth; i < whole; i += S::kWidth) top = S::max(top, S::load(scores + i));
  maximum = S::reduce_max(top);
  auto sum = S::zero();
  for (int64_t i = 0; i < whole; i += S::kWidth) {
    const auto weight = exp2<S>(S::sub(S::load(scores + i), S::set(maximum)));
    sum = S::add(sum, weight);
    S::store(scores + i, value_scales == nullptr ? weight : S::mul(weight, S::load(value_scales + i)));
  }
  total = S::reduce_add(sum);
}

// values[h][0..kUnits units) += weights[h] . rows, from column d on; the last unit of a row may have a `rest` only
template <class S, class T, int kHeads, int kUnits, bool kWhole, class L>
void value_tile(const T* const* rows, int64_t d, int64_t rest, int64_t count, const float* weights, int64_t stride,
                float* values, L& lead) {
  typename S::V sum[kHeads][2 * kUnits];
  for (int h = 0; h < kHeads; ++h)
    for (int u = 0; u < 2 * kUnits; ++u) sum[h][u] = S::load(values + h * stride + d + u * S::kWidth);
  L ahead = lead;
  for (int64_t i = 0; i < count; ++i) {
    typename S::V row[2 * kUnits];
    for (int u = 0; u < kUnits; ++u) load_unit<S, kWhole>(rows[i] + d + u * kUnit<S>, rest, row[2 * u], row[2 * u + 1]);
    if constexpr (kWhole) {
      ahead.template pass<kUnits * kUnit<S> * sizeof(T)>();
    } else {
      ahead.pass(rest * static_cast<int64_t>(sizeof(T)));
    }
    for (int h = 0; h < kHeads; ++h) {
      const auto weight = S::set(weights[h * kScoreRow + i]);
      for (int u = 0; u < 2 * kUnits; ++u) sum[h][u] = S::fma(row[u], weight, sum[h][u]);
    }
  }
  lead = ahead;
  for (int h = 0; h < kHeads; ++h)
    for (int u = 0; u < 2 * kUnits; ++u) S::store(values + h * stride + d + u * S::kWidth, sum[h][u]);
}

template <class S, class T, int kHeads, class L>
void value_columns(const T* const* rows, int64_t count, const float* weights, int64_t head_dim, float* values,
                   L& lead) {
  const int64_t full = head_dim / kUnit<S> * kUnit<S>, rest = head_dim - full, stride = padded<S>(head_dim);
  int64_t d = 0;
  for (; d + 2 * kUnit<S> <= full; d += 2 * kUnit<S>)
    value_tile<S, T, kHeads, 2, true>(rows, d, 0, count, weights, stride, values, lead);
  if (d < full) value_tile<S, T, kHeads, 1, true>(rows, d, 0, count, weights, stride, values, lead);
  if (rest > 0) value_tile<S, T, kHeads, 1, false>(rows, full, rest, count, weights, stride, values, lead);
}

template <class S, class T, int kHeads = S::kHeadTile, class L>
void value_heads(const T* const* rows, int64_t count, const float* weights, int64_t heads, int64_t head_dim,
                 float* values, L& lead) {
  if (heads >= kHeads) {
    value_columns<S, T, kHeads>(rows, count, weights, head_dim, values, lead);
    NoLead none;
    const int64_t rest = heads - kHeads;
    if (rest > 0)
      value_heads<S, T, kHeads>(rows, count, weights + kHeads * kScoreRow, rest, head_dim,
                                values + kHeads * padded<S>(head_dim), none);
  } else if constexpr (kHeads > 1) {
    value_heads<S, T, kHeads - 1>(rows, count, weights, heads, head_dim, values, lead);
  }
}

// Rows of all runs, as many at a time as a tile takes: small blocks do not make small tiles.
template <class S, class T>
void sweep_values(const Run* run, const Run* end, const float* weights, int64_t heads, int64_t head_dim, float* values,
                  Lead& lead) {
  constexpr int64_t kRows = sizeof(T) == 1 ? 2 * kValueTile : kValueTile;
  const T* rows[kRows];
  int64_t count = 0;
  const auto flush = [&] {
    value_heads<S, T>(rows, count, weights, heads, head_dim, values, lead);
    weights += count, count = 0;
  };
  for (; run != end; ++run) {
    const auto* row = reinterpret_cast<const T*>(run->rows);
    for (int64_t i = 0; i < run->count; ++i, row += head_dim) {
      rows[count++] = row;
      if (count == kRows) flush();
    }
  }
  if (count > 0) flush();
}

// Writes the runs of a piece to `runs`, block by block, and returns their end. Stride and rows are in bytes.
Run* find_runs(const GqaArgs& args, const Piece& piece, const void* cache, int64_t stride, int64_t row, Run* runs) {
  const int32_t* table = args.tables + piece.sequence * args.table_stride;
  int64_t block = piece.begin / args.block_size, offset = piece.begin % args.block_size;
  for (int64_t at = piece.begin; at < piece.end; ++block, offset = 0) {
    const int64_t room = args.block_size - offset, left = piece.end - at;
    const int64_t first = table[block] * stride + (piece.kv_head * args.block_size + offset) * row;
    *runs = {static_cast<const char*>(cache) + first, room < left ? room : left};
    at += (runs++)->count;
  }
  return runs;
}

// The scales of a piece beside an int8 cache: asked for while the keys are swept, then laid side by side.
class Scales {
 public:
  Scales(const GqaArgs& args, const Piece& piece) {
    constexpr int64_t kBytes = sizeof(float);
    values_ = find_runs(args, piece, args.k_scale, args.k_scale_stride * kBytes, kBytes, runs_);
    end_ = find_runs(args, piece, args.v_scale, args.v_scale_stride * kBytes, kBytes, values_);
  }
  void fetch(int64_t run) const {
    fetch(runs_[run]);
    fetch(values_[run]);
  }
  // To two rows of kScoreRow floats; what lies between the end of the piece and the next whole vector is zero.
  void gather(float* keys, float* values) const {
    gather(runs_, values_, keys);
    gather(values_, end_, values);
  }

 private:
  static constexpr int64_t kLineFloats = 16;
  static void fetch(const Run& run) {
    for (int64_t i = 0; i < run.count; i += kLineFloats) __builtin_prefetch(run.rows + i * sizeof(float));
  }
  void gather(const Run* run, const Run* end, float* to) const {
    for (; run != end; to += (run++)->count)
      std::memcpy(to, run->rows, static_cast<size_t>(run->count) * sizeof(float));
    for (int64_t i = 0; i < kScoreRow - kChunk; ++i) *to++ = 0.0f;
  }

  Run runs_[2 * kChunk];
  Run *values_, *end_;
};
struct NoScales {
  NoScales(const GqaArgs&, const Piece&) {}
  void fetch(int64_t) const {}
};

template <class S, class Q, class T>
void attend(const GqaArgs& args, const Piece& piece, float* scratch, const Partial& part) {
  constexpr bool kScaled = std::is_same_v<T, int8_t>;
  const int64_t heads = args.q_heads / args.kv_heads, head_dim = args.head_dim, stride = padded<S>(head_dim);
  const int64_t count = piece.end - piece.begin;
  float* scores = scratch;
  float* q = scratch + heads * kScoreRow;
  float* key_scales = kScaled ? q + heads * stride : nullptr;
  float* value_scales = kScaled ? key_scales + kScoreRow : nullptr;
  Run runs[2 * kChunk];
  constexpr int64_t kBytes = sizeof(T);
  Run* const values = find_runs(args, piece, args.k_cache, args.k_stride * kBytes, head_dim * kBytes, runs);
  const Run* const end = find_runs(args, piece, args.v_cache, args.v_stride * kBytes, head_dim * kBytes, values);
  const std::conditional_t<kScaled, Scales, NoScales> scales(args, piece);
  Lead lead(runs, end, head_dim * kBytes);

  const Q* group = static_cast<const Q*>(args.q) + piece.sequence * args.q_stride + piece.kv_head * heads * head_dim;
  pack_queries<S, Q, T>(group, heads, head_dim, args.softcap > 0 ? args.scale / args.softcap : args.scale * kLog2E, q);
  float* at = scores;
  for (const Run* run = runs; run != values; at += (run++)->count) {
    scales.fetch(run - runs);
    score_run<S, T>(*run, q, heads, head_dim, at, lead);
  }
  if constexpr (kScaled) scales.gather(key_scales, value_scales);
  for (int64_t h = 0; h < heads; ++h) {
    float* row = scores + h * kScoreRow;
    if (kScaled || args.softcap > 0.0f) finish_scores<S>(row, count, key_scales, args.softcap);
    softmax<S>(row, count, value_scales, part.maximum[h], part.sum[h]);
  }
  for (int64_t i = 0; i < heads * stride; i += S::kWidth) S::store(part.values + i, S::zero());
  sweep_values<S, T>(values, end, scores, heads, head_dim, part.values, lead);
}

template <class S, class Q, class T>
void merge(const GqaArgs& args, int64_t sequence, int64_t kv_head, const Partial* parts, int64_t count) {
  const int64_t heads = args.q_heads / args.kv_heads, head_dim = args.head_dim, stride = padded<S>(head_dim);
  const int64_t full = head_dim / kUnit<S> * kUnit<S>;
  Q* out = static_cast<Q*>(args.out) + sequence * args.out_stride + kv_head * heads * head_dim;
  for (int64_t h = 0; h < heads; ++h, out += head_dim) {
    const float sink = args.sinks == nullptr ? -kInfinity : args.sinks[kv_head * heads + h] * kLog2E;
    const auto inverse = S::set(1.0f / factors<S>(parts, count, h, sink));
    for (int64_t d = 0; d < head_dim; d += kUnit<S>) {
      auto a = S::zero(), b = S::zero();
      for (int64_t c = 0; c < count; ++c) {
        const auto factor = S::set(parts[c].maximum[h]);
        const float* values = parts[c].values + h * stride + d;
        a = S::fma(factor, S::load(values), a);
        b = S::fma(factor, S::load(values + S::kWidth), b);
      }
      a = S::mul(a, inverse), b = S::mul(b, inverse);
      if constexpr (!std::is_same_v<Q, T>) S::template bend<Q>(a, b);
      if (d < full) {
        S::store2(out + d, a, b);
      } else {
        S::store2_part(out + d, head_dim - d, a, b);
      }
    }
  }
}

template <class S>
const GqaKernels& kernels() {
  static const GqaKernels table = {
      .pad = kUnit<S>,
      .attend = {attend<S, float, float>, attend<S, Bf16, Bf16>, attend<S, Fp16, Fp16>},
      .attend_int8 = {attend<S, float, int8_t>, attend<S, Bf16, int8_t>, attend<S, Fp16, int8_t>},
      .merge = {merge<S, float, float>, merge<S, Bf16, Bf16>, merge<S, Fp16, Fp16>},
      .merge_int8 = {merge<S, float, int8_t>, merge<S, Bf16, int8_t>, merge<S, Fp16, int8_t>},
      .quantise = {quantise<float>, quantise<Bf16>, quantise<Fp16>}};
  return table;
}

}  // namespace
}  // namespace moelight
