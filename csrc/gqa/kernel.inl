// The one algorithm of decode attention, over a SIMD type S (simd_*.h). Included once by each instruction set's file;
// all of it has internal linkage. Two sweeps over a chunk: keys into scores, then, after the softmax, values into sums.
// Both read memory once, in order, and are bound by that: the lead fetches while they compute.
//
// "Packed order": S::load2 reads 2 * S::kWidth elements into two vectors in whatever order is cheapest for the stored
// type. Queries and sums are kept in that order; only S::store2 undoes it.

#include "gqa.h"
#include "lead.h"

namespace moelight {
namespace {

constexpr int kKeys = 4;            // keys per register tile of the score sweep
constexpr int64_t kValueTile = 32;  // rows of V that stay in the first-level cache while the heads pass over them

template <class S>
constexpr int64_t kUnit = 2 * S::kWidth;

template <class S>
int64_t padded(int64_t head_dim) {
  return (head_dim + kUnit<S> - 1) / kUnit<S> * kUnit<S>;
}

// 2^x for x <= 0, relative error below 2e-7; not a number stays so.
template <class S>
typename S::V exp2(typename S::V x) {
  x = S::max(S::set(-125.0f), x);
  const auto whole = S::round(x);
  const auto f = S::sub(x, whole);
  auto y = S::set(1.535336188319500e-4f);
  y = S::fma(y, f, S::set(1.339887440266574e-3f));
  y = S::fma(y, f, S::set(9.618437357674640e-3f));
  y = S::fma(y, f, S::set(5.550332471162809e-2f));
  y = S::fma(y, f, S::set(2.402264791363012e-1f));
  y = S::fma(y, f, S::set(6.931472028550421e-1f));
  y = S::fma(y, f, S::set(1.0f));
  return S::scale(y, whole);
}

template <class S, class T>
void pack_queries(const T* q, int64_t heads, int64_t head_dim, float scale, float* packed) {
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
      S::store(packed, S::mul(a, factor));
      S::store(packed + S::kWidth, S::mul(b, factor));
    }
  }
}

// scores[h][0..4) = q[h] . row[0..4)
template <class S, class T, int kHeads, class L>
void score_tile(const T* const (&row)[kKeys], const float* q, int64_t head_dim, float* scores, L& lead) {
  typename S::V sum[kHeads][kKeys];
  for (int h = 0; h < kHeads; ++h)
    for (int k = 0; k < kKeys; ++k) sum[h][k] = S::zero();
  const int64_t full = head_dim / kUnit<S> * kUnit<S>, stride = padded<S>(head_dim);
  L ahead = lead;
  auto step = [&](int64_t d, int64_t width, auto load) {
    typename S::V a[kKeys], b[kKeys];
    for (int k = 0; k < kKeys; ++k) load(row[k] + d, a[k], b[k]);
    ahead.pass(kKeys * width * static_cast<int64_t>(sizeof(T)));
    for (int h = 0; h < kHeads; ++h) {
      const auto qa = S::load(q + h * stride + d), qb = S::load(q + h * stride + d + S::kWidth);
      for (int k = 0; k < kKeys; ++k) sum[h][k] = S::fma(b[k], qb, S::fma(a[k], qa, sum[h][k]));
    }
  };
  for (int64_t d = 0; d < full; d += kUnit<S>) {
    step(d, kUnit<S>, [](const T* p, auto& a, auto& b) { S::load2(p, a, b); });
  }
  if (full < head_dim) {
    step(full, head_dim - full, [&](const T* p, auto& a, auto& b) { S::load2_part(p, head_dim - full, a, b); });
  }
  lead = ahead;
  for (int h = 0; h < kHeads; ++h) S::sum4(sum[h][0], sum[h][1], sum[h][2], sum[h][3], scores + h * kScoreRow);
}

// All heads of the group, tile by tile; the first tile brings the rows into the cache and moves the lead.
template <class S, class T, int kHeads = S::kHeadTile, class L>
void score_heads(const T* const (&row)[kKeys], const float* q, int64_t heads, int64_t head_dim, float* scores,
                 L& lead) {
  if (heads >= kHeads) {
    score_tile<S, T, kHeads>(row, q, head_dim, scores, lead);
    NoLead none;
    const int64_t rest = heads - kHeads;
    if (rest > 0)
      score_heads<S, T, kHeads>(row, q + kHeads * padded<S>(head_dim), rest, head_dim, scores + kHeads * kScoreRow,
                                none);
  } else if constexpr (kHeads > 1) {
    score_heads<S, T, kHeads - 1>(row, q, heads, head_dim, scores, lead);
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
    score_heads<S, T>(row, q, heads, head_dim, scores + i, lead);
  }
}

// Turns the first `count` scores of each head into weights relative to their maximum.
template <class S>
void softmax(float* scores, int64_t heads, int64_t count, const Partial& part) {
  const int64_t whole = (count + S::kWidth - 1) / S::kWidth * S::kWidth;
  for (int64_t h = 0; h < heads; ++h, scores += kScoreRow) {
    for (int64_t i = count; i < whole; ++i) scores[i] = -__builtin_inff();
    auto top = S::load(scores);
    for (int64_t i = S::kWidth; i < whole; i += S::kWidth) top = S::max(top, S::load(scores + i));
    const float maximum = S::reduce_max(top);
    auto sum = S::zero();
    for (int64_t i = 0; i < whole; i += S::kWidth) {
      const auto weight = exp2<S>(S::sub(S::load(scores + i), S::set(maximum)));
      S::store(scores + i, weight);
      sum = S::add(sum, weight);
    }
    part.maximum[h] = maximum;
    part.sum[h] = S::reduce_add(sum);
  }
}

// values[h][0..kUnits units) += weights[h] . v
template <class S, class T, int kHeads, int kUnits, class L, class Load>
void value_tile(const T* v, int64_t count, const float* weights, int64_t head_dim, float* values, L& lead,
                int64_t width, Load load) {
  const int64_t stride = padded<S>(head_dim);
  typename S::V sum[kHeads][2 * kUnits];
  for (int h = 0; h < kHeads; ++h)
    for (int u = 0; u < 2 * kUnits; ++u) sum[h][u] = S::load(values + h * stride + u * S::kWidth);
  L ahead = lead;
  for (int64_t i = 0; i < count; ++i, v += head_dim) {
    typename S::V row[2 * kUnits];
    for (int u = 0; u < kUnits; ++u) load(v + u * kUnit<S>, row[2 * u], row[2 * u + 1]);
    ahead.pass(width * static_cast<int64_t>(sizeof(T)));
    for (int h = 0; h < kHeads; ++h) {
      const auto weight = S::set(weights[h * kScoreRow + i]);
      for (int u = 0; u < 2 * kUnits; ++u) sum[h][u] = S::fma(row[u], weight, sum[h][u]);
    }
  }
  lead = ahead;
  for (int h = 0; h < kHeads; ++h)
    for (int u = 0; u < 2 * kUnits; ++u) S::store(values + h * stride + u * S::kWidth, sum[h][u]);
}

template <class S, class T, int kHeads, class L>
void value_columns(const T* v, int64_t count, const float* weights, int64_t head_dim, float* values, L& lead) {
  const int64_t full = head_dim / kUnit<S> * kUnit<S>, rest = head_dim - full;
  const auto whole = [](const T* p, auto& a, auto& b) { S::load2(p, a, b); };
  const auto part = [&](const T* p, auto& a, auto& b) { S::load2_part(p, rest, a, b); };
  int64_t d = 0;
  for (; d + 2 * kUnit<S> <= full; d += 2 * kUnit<S>)
    value_tile<S, T, kHeads, 2>(v + d, count, weights, head_dim, values + d, lead, 2 * kUnit<S>, whole);
  if (d < full) value_tile<S, T, kHeads, 1>(v + d, count, weights, head_dim, values + d, lead, kUnit<S>, whole);
  if (rest > 0) value_tile<S, T, kHeads, 1>(v + full, count, weights, head_dim, values + full, lead, rest, part);
}

template <class S, class T, int kHeads = S::kHeadTile, class L>
void value_heads(const T* v, int64_t count, const float* weights, int64_t heads, int64_t head_dim, float* values,
                 L& lead) {
  if (heads >= kHeads) {
    value_columns<S, T, kHeads>(v, count, weights, head_dim, values, lead);
    NoLead none;
    const int64_t rest = heads - kHeads;
    if (rest > 0)
      value_heads<S, T, kHeads>(v, count, weights + kHeads * kScoreRow, rest, head_dim,
                                values + kHeads * padded<S>(head_dim), none);
  } else if constexpr (kHeads > 1) {
    value_heads<S, T, kHeads - 1>(v, count, weights, heads, head_dim, values, lead);
  }
}

template <class S, class T>
void value_run(const Run& run, const float* weights, int64_t heads, int64_t head_dim, float* values, Lead& lead) {
  const auto* rows = reinterpret_cast<const T*>(run.rows);
  for (int64_t i = 0; i < run.count; i += kValueTile) {
    const int64_t count = run.count - i < kValueTile ? run.count - i : kValueTile;
    value_heads<S, T>(rows + i * head_dim, count, weights + i, heads, head_dim, values, lead);
  }
}

// Writes the runs of a piece to `runs`, block by block, and returns their end.
Run* find_runs(const GqaArgs& args, const Piece& piece, const void* cache, int64_t stride, Run* runs) {
  const int32_t* table = args.tables + piece.sequence * args.table_stride;
  const int64_t row_bytes = args.head_dim * dtype_bytes(args.dtype);
  for (int64_t at = piece.begin; at < piece.end;) {
    const int64_t block = at / args.block_size, offset = at % args.block_size;
    const int64_t room = args.block_size - offset, left = piece.end - at;
    const int64_t first =
        table[block] * stride * dtype_bytes(args.dtype) + (piece.kv_head * args.block_size + offset) * row_bytes;
    *runs = {static_cast<const char*>(cache) + first, room < left ? room : left};
    at += (runs++)->count;
  }
  return runs;
}

template <class S, class T>
void attend(const GqaArgs& args, const Piece& piece, float* scratch, const Partial& part) {
  const int64_t heads = args.q_heads / args.kv_heads, head_dim = args.head_dim, stride = padded<S>(head_dim);
  constexpr float kLog2E = 1.4426950408889634f;
  float* scores = scratch;
  float* q = scratch + heads * kScoreRow;
  Run runs[2 * kChunk];
  Run* const values = find_runs(args, piece, args.k_cache, args.k_stride, runs);
  const Run* const end = find_runs(args, piece, args.v_cache, args.v_stride, values);
  Lead lead(runs, end, head_dim * static_cast<int64_t>(sizeof(T)));

  const T* group = static_cast<const T*>(args.q) + piece.sequence * args.q_stride + piece.kv_head * heads * head_dim;
  pack_queries<S>(group, heads, head_dim, args.scale * kLog2E, q);
  float* at = scores;
  for (const Run* run = runs; run != values; at += (run++)->count) score_run<S, T>(*run, q, heads, head_dim, at, lead);
  softmax<S>(scores, heads, piece.end - piece.begin, part);
  for (int64_t i = 0; i < heads * stride; i += S::kWidth) S::store(part.values + i, S::zero());
  at = scores;
  for (const Run* run = values; run != end; at += (run++)->count)
    value_run<S, T>(*run, at, heads, head_dim, part.values, lead);
}

// Replaces the maxima of one head by the factors that bring its partials to a common maximum.
template <class S>
float factors(const Partial* parts, int64_t count, int64_t h) {
  float maximum = parts[0].maximum[h];
  for (int64_t c = 1; c < count; ++c) maximum = parts[c].maximum[h] > maximum ? parts[c].maximum[h] : maximum;
  float total = 0.0f;
  for (int64_t c = 0; c < count; ++c) {
    float lanes[S::kWidth];
    S::store(lanes, exp2<S>(S::set(parts[c].maximum[h] - maximum)));
    parts[c].maximum[h] = lanes[0];
    total += lanes[0] * parts[c].sum[h];
  }
  return total;
}

template <class S, class T>
void merge(const GqaArgs& args, int64_t sequence, int64_t kv_head, const Partial* parts, int64_t count) {
  const int64_t heads = args.q_heads / args.kv_heads, head_dim = args.head_dim, stride = padded<S>(head_dim);
  const int64_t full = head_dim / kUnit<S> * kUnit<S>;
  T* out = static_cast<T*>(args.out) + sequence * args.out_stride + kv_head * heads * head_dim;
  for (int64_t h = 0; h < heads; ++h, out += head_dim) {
    const auto inverse = S::set(1.0f / factors<S>(parts, count, h));
    for (int64_t d = 0; d < head_dim; d += kUnit<S>) {
      auto a = S::zero(), b = S::zero();
      for (int64_t c = 0; c < count; ++c) {
        const auto factor = S::set(parts[c].maximum[h]);
        const float* values = parts[c].values + h * stride + d;
        a = S::fma(factor, S::load(values), a);
        b = S::fma(factor, S::load(values + S::kWidth), b);
      }
      a = S::mul(a, inverse), b = S::mul(b, inverse);
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
  static const GqaKernels table = {kUnit<S>,
                                   {attend<S, float>, attend<S, Bf16>, attend<S, Fp16>},
                                   {merge<S, float>, merge<S, Bf16>, merge<S, Fp16>}};
  return table;
}

}  // namespace
}  // namespace moelight
