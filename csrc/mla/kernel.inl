// The one algorithm of latent attention, over a SIMD type S (lanes_*.h). Included once by each instruction set's file;
// all of it has internal linkage.
//
// All heads share a row, so arithmetic binds where there are many of them. A block of rows is widened to float32 once,
// unit by unit of all rows, and stays in the second-level cache while units of heads pass over it. For the scores lanes
// are heads, and numbers of rows are broadcast: the softmax is one of lanes. For the values lanes are numbers of a row,
// and the weights are broadcast. Rows, queries and sums are in packed order (softmax.inl), filled up with zeros.

#include <algorithm>
#include <type_traits>

#include "gqa/lead.h"
#include "gqa/softmax.inl"
#include "mla.h"

namespace moelight {
namespace {

// Numbers of a row that meet a unit of heads while they are in the first-level cache.
constexpr int64_t kDepth = 192;

// A register tile is kTile rows by a unit of heads for scores, or twice as many by a vector of heads; for values it is
// kTile heads by a unit of a row.
template <class S>
constexpr int kTile = 3 * S::kHeadTile;

template <class S>
void store_unit(float* to, typename S::V a, typename S::V b) {
  S::store(to, a), S::store(to + S::kWidth, b);
}

template <int kCount>
using Constant = std::integral_constant<int, kCount>;

// Calls tile(number of heads, first head) for tiles of kHeads, and of fewer at the end.
template <int kHeads, class F>
void head_tiles(int64_t first, int64_t heads, const F& tile) {
  for (; first + kHeads <= heads; first += kHeads) tile(Constant<kHeads>{}, first);
  if constexpr (kHeads > 1) {
    if (first < heads) head_tiles<kHeads - 1>(first, heads, tile);
  }
}

// scores[key][head] = or += rows[key] . queries[.][head], over `depth` numbers, for kVectors vectors of heads; `bytes`
// of the lead go with each unit
template <class S, int kKeys, int kVectors>
void score_tile(const float* queries, const float* rows, int64_t depth, float* scores, bool first, Lead& lead,
                int64_t bytes) {
  typename S::V sum[kKeys][kVectors];
#pragma GCC unroll 24
  for (int k = 0; k < kKeys; ++k)
#pragma GCC unroll 2
    for (int u = 0; u < kVectors; ++u) sum[k][u] = S::zero();
  for (int64_t d = 0; d < depth; d += kUnit<S>, rows += kMlaRows * kUnit<S>) {
    lead.pass(bytes);
#pragma GCC unroll 4
    for (int64_t j = 0; j < kUnit<S>; ++j, queries += kUnit<S>) {
      typename S::V query[kVectors];
#pragma GCC unroll 2
      for (int u = 0; u < kVectors; ++u) query[u] = S::load(queries + u * S::kWidth);
#pragma GCC unroll 24
      for (int k = 0; k < kKeys; ++k) {
        const auto number = S::set(rows[k * kUnit<S> + j]);
#pragma GCC unroll 2
        for (int u = 0; u < kVectors; ++u) sum[k][u] = S::fma(number, query[u], sum[k][u]);
      }
    }
  }
#pragma GCC unroll 24
  for (int k = 0; k < kKeys; ++k)
#pragma GCC unroll 2
    for (int u = 0; u < kVectors; ++u) {
      float* const to = scores + k * kUnit<S> + u * S::kWidth;
      S::store(to, first ? sum[k][u] : S::add(S::load(to), sum[k][u]));
    }
}

// values[h] = factors[h] * values[h] + weights[.][h] . rows, a unit of each
template <class S, int kHeads>
void value_tile(const float* rows, int64_t count, const float* weights, const float* factors, float* values,
                bool first) {
  typename S::V sum[kHeads][2];
#pragma GCC unroll 12
  for (int h = 0; h < kHeads; ++h)
#pragma GCC unroll 2
    for (int u = 0; u < 2; ++u)
      sum[h][u] = first ? S::zero() : S::mul(S::load(values + h * kUnit<S> + u * S::kWidth), S::set(factors[h]));
#pragma GCC unroll 4
  for (int64_t i = 0; i < count; ++i, rows += kUnit<S>, weights += kUnit<S>) {
    const auto a = S::load(rows), b = S::load(rows + S::kWidth);
#pragma GCC unroll 12
    for (int h = 0; h < kHeads; ++h) {
      const auto weight = S::set(weights[h]);
      sum[h][0] = S::fma(a, weight, sum[h][0]), sum[h][1] = S::fma(b, weight, sum[h][1]);
    }
  }
#pragma GCC unroll 12
  for (int h = 0; h < kHeads; ++h)
#pragma GCC unroll 2
    for (int u = 0; u < 2; ++u) S::store(values + h * kUnit<S> + u * S::kWidth, sum[h][u]);
}

// A vector of heads of one block: scores become weights relative to the largest so far; `factor` brings what was summed
// relative to a smaller one down.
template <class S>
void soften(float* scores, int64_t count, float* maximum, float* total, float* factor) {
  const auto before = S::load(maximum);
  auto top = before;
  for (int64_t i = 0; i < count; ++i) top = S::max(top, S::load(scores + i * kUnit<S>));
  const auto down = exp2<S>(S::sub(before, top));
  auto sum = S::zero();
  for (int64_t i = 0; i < count; ++i) {
    const auto weight = exp2<S>(S::sub(S::load(scores + i * kUnit<S>), top));
    S::store(scores + i * kUnit<S>, weight);
    sum = S::add(sum, weight);
  }
  S::store(maximum, top), S::store(factor, down), S::store(total, S::fma(S::load(total), down, sum));
}

// The memory of one piece while it is summed.
template <class S, class T>
class Sweep {
 public:
  Sweep(const MlaArgs& args, const MlaPiece& piece, float* scratch, const Partial& part)
      : args_(args),
        piece_(piece),
        part_(part),
        heads_(piece.last_head - piece.first_head),
        lanes_(padded<S>(heads_)),
        row_elements_(args.latent + args.rotary),
        width_(padded<S>(row_elements_)),
        columns_(padded<S>(args.latent)),
        queries_(scratch),
        rows_(queries_ + lanes_ * width_),
        scores_(rows_ + kMlaRows * width_),
        factors_(scores_ + kMlaRows * lanes_) {}

  void run() {
    pack_queries();
    std::fill_n(part_.maximum, lanes_, -kInfinity), std::fill_n(part_.sum, lanes_, 0.0f);
    LatentRun runs[kMlaChunk];
    const int64_t row_bytes = row_elements_ * static_cast<int64_t>(sizeof(T));
    Lead lead(runs, find_runs(runs), row_bytes);
    // The lead is a block ahead: the first comes with its own widening, each later one while its forerunner is summed.
    lead.pass(std::min(kMlaRows, piece_.end - piece_.begin) * row_bytes);
    const LatentRun* run = runs;
    int64_t at_run = 0;
    for (int64_t at = piece_.begin; at < piece_.end; at += kMlaRows) {
      const int64_t count = std::min(kMlaRows, piece_.end - at);
      const T* rows[kMlaRows];
      for (int64_t i = 0; i < count; ++i) {
        rows[i] = reinterpret_cast<const T*>(run->rows + at_run * row_bytes);
        if (++at_run == run->count) ++run, at_run = 0;
      }
      widen(rows, count);
      score(count, lead, row_bytes);
      for (int64_t h = 0; h < heads_; h += S::kWidth)
        soften<S>(scores_of(h), count, part_.maximum + h, part_.sum + h, factors_ + h);
      value(count, at == piece_.begin);
    }
  }

 private:
  void widen(const T* const* rows, int64_t count) const {
    const int64_t full = row_elements_ / kUnit<S> * kUnit<S>, rest = row_elements_ - full;
    typename S::V a, b;
    for (int64_t d = 0; d < full; d += kUnit<S>)
      for (int64_t i = 0; i < count; ++i) {
        S::load2(rows[i] + d, a, b);
        store_unit<S>(rows_ + d * kMlaRows + i * kUnit<S>, a, b);
      }
    if (rest == 0) return;
    for (int64_t i = 0; i < count; ++i) {
      T last[kUnit<S>] = {};
      std::copy_n(rows[i] + full, rest, last);
      S::load2(last, a, b);
      store_unit<S>(rows_ + full * kMlaRows + i * kUnit<S>, a, b);
    }
  }

  // Number by number the heads of a unit. Heads that are no more than padding ask for nothing.
  void pack_queries() const {
    static_assert(kUnit<S> <= kMlaRows, "what is joined here lies where rows will");
    const T* latent = static_cast<const T*>(args_.q_latent) + piece_.sequence * args_.q_latent_stride;
    const T* rotary = static_cast<const T*>(args_.q_rotary) + piece_.sequence * args_.q_rotary_stride;
    const auto factor = S::set(args_.scale * kLog2E);
    T* const joined = reinterpret_cast<T*>(rows_);
    for (int64_t first = 0; first < lanes_; first += kUnit<S>) {
      const int64_t heads = std::min(kUnit<S>, heads_ - first);
      std::fill_n(joined, kUnit<S> * width_, T{});
      for (int64_t i = 0; i < heads; ++i) {
        const int64_t h = piece_.first_head + first + i;
        std::copy_n(latent + h * args_.latent, args_.latent, joined + i * width_);
        std::copy_n(rotary + h * args_.rotary, args_.rotary, joined + i * width_ + args_.latent);
      }
      float* to = queries_ + first * width_;
      for (int64_t d = 0; d < width_; d += kUnit<S>, to += kUnit<S> * kUnit<S>) {
        float wide[kUnit<S> * kUnit<S>];
        for (int64_t i = 0; i < kUnit<S>; ++i) {
          typename S::V a, b;
          S::load2(joined + i * width_ + d, a, b);
          store_unit<S>(wide + i * kUnit<S>, S::mul(a, factor), S::mul(b, factor));
        }
        for (int64_t j = 0; j < kUnit<S>; ++j)
          for (int64_t i = 0; i < kUnit<S>; ++i) to[j * kUnit<S> + i] = wide[i * kUnit<S> + j];
      }
    }
  }

  LatentRun* find_runs(LatentRun* runs) const {
    const int32_t* table = args_.tables + piece_.sequence * args_.table_stride;
    for (int64_t at = piece_.begin; at < piece_.end; at += (runs++)->count) {
      const int64_t block = at / args_.block_size, offset = at % args_.block_size;
      const int64_t in_block = args_.block_size - offset, left = piece_.end - at;
      const T* first = static_cast<const T*>(args_.cache) + table[block] * args_.cache_stride + offset * row_elements_;
      *runs = {reinterpret_cast<const char*>(first), in_block < left ? in_block : left};
    }
    return runs;
  }

  // A short last tile takes rows of the block before, or whatever lay there: nobody reads its scores beyond `count`.
  void score(int64_t count, Lead& lead, int64_t row_bytes) const {
    const int64_t units = width_ / kUnit<S> * (lanes_ / kUnit<S>);
    const int64_t ahead = row_bytes / units + 1;  // of each unit of each row
    static_assert(kMlaRows % (2 * kTile<S>) == 0);
    for (int64_t d = 0; d < width_; d += kDepth) {
      const int64_t depth = std::min(kDepth, width_ - d);
      for (int64_t h = 0; h < heads_; h += kUnit<S>) {
        const float *queries = queries_ + h * width_ + d * kUnit<S>, *rows = rows_ + d * kMlaRows;
        const auto tiles = [&](auto keys, auto vectors) {
          for (int64_t i = 0; i < count * kUnit<S>; i += keys * kUnit<S>)
            score_tile<S, keys, vectors>(queries, rows + i, depth, scores_of(h) + i, d == 0, lead, keys * ahead);
        };
        if (heads_ - h > S::kWidth) {
          tiles(Constant<kTile<S>>{}, Constant<2>{});
        } else {
          tiles(Constant<2 * kTile<S>>{}, Constant<1>{});
        }
      }
    }
  }

  void value(int64_t count, bool first) const {
    for (int64_t d = 0; d < columns_; d += kUnit<S>)
      for (int64_t unit = 0; unit < heads_; unit += kUnit<S>)
        head_tiles<kTile<S>>(unit, std::min(heads_, unit + kUnit<S>), [&](auto size, int64_t h) {
          value_tile<S, size>(rows_ + d * kMlaRows, count, scores_of(h), factors_ + h,
                              part_.values + d * heads_ + h * kUnit<S>, first);
        });
  }

  // [kMlaRows, kUnit] for each unit of heads.
  float* scores_of(int64_t h) const { return scores_ + h / kUnit<S> * kUnit<S> * kMlaRows + h % kUnit<S>; }

  const MlaArgs& args_;
  const MlaPiece& piece_;
  const Partial& part_;
  const int64_t heads_, lanes_, row_elements_, width_, columns_;
  float *const queries_, *const rows_, *const scores_, *const factors_;
};

template <class S, class T>
void attend(const MlaArgs& args, const MlaPiece& piece, float* scratch, const Partial& part) {
  Sweep<S, T>(args, piece, scratch, part).run();
}

template <class S, class T>
void merge(const MlaArgs& args, const MlaPiece& piece, const Partial* parts, int64_t count) {
  const int64_t columns = padded<S>(args.latent);
  T* out = static_cast<T*>(args.out) + piece.sequence * args.out_stride + piece.first_head * args.latent;
  const int64_t heads = piece.last_head - piece.first_head;
  for (int64_t h = 0; h < heads; ++h, out += args.latent) {
    const auto inverse = S::set(1.0f / factors<S>(parts, count, h, -kInfinity));
    const auto joined = [&](int64_t at) {
      auto sum = S::zero();
      for (int64_t c = 0; c < count; ++c) sum = S::fma(S::set(parts[c].maximum[h]), S::load(parts[c].values + at), sum);
      return S::mul(sum, inverse);
    };
    for (int64_t d = 0; d < columns; d += kUnit<S>) {
      const int64_t at = d * heads + h * kUnit<S>;
      const auto a = joined(at), b = joined(at + S::kWidth);
      if (d + kUnit<S> <= args.latent) {
        S::store2(out + d, a, b);
      } else {
        T last[kUnit<S>];
        S::store2(last, a, b);
        std::copy_n(last, args.latent - d, out + d);
      }
    }
  }
}

template <class S>
int64_t scratch_floats(int64_t heads, int64_t latent, int64_t rotary) {
  const int64_t width = padded<S>(latent + rotary);
  return padded<S>(heads) * (width + kMlaRows + 1) + kMlaRows * width;
}

template <class S>
const MlaKernels& kernels() {
  static const MlaKernels table = {.pad = kUnit<S>,
                                   .scratch_floats = scratch_floats<S>,
                                   .attend = {attend<S, float>, attend<S, Bf16>, attend<S, Fp16>},
                                   .merge = {merge<S, float>, merge<S, Bf16>, merge<S, Fp16>}};
  return table;
}

}  // namespace
}  // namespace moelight
