// The one algorithm of latent attention, over a SIMD type S (lanes_*.h). Included once by each instruction set's file;
// all of it has internal linkage.
//
// All heads share a row, so arithmetic binds where there are many of them: a block of rows is widened to float32 once
// and stays in the second-level cache while tiles of heads pass over it, scores first, then, after an online softmax,
// values. Everything widened is in the order of memory; rows are padded with zeros to whole units.

#include <cstring>
#include <type_traits>

#include "gqa/lead.h"
#include "gqa/softmax.inl"
#include "mla.h"

namespace moelight {
namespace {

constexpr int64_t kNearRows = 16;    // rows that stay in the first-level cache while the heads pass over them
constexpr int64_t kTileVectors = 4;  // vectors of a row per register tile of the values

template <class S, class T>
void widen(const T* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kUnit<S> <= count; i += kUnit<S>) {
    typename S::V a, b;
    S::load2(from + i, a, b);
    S::template straighten<T>(a, b);
    S::store(to + i, a);
    S::store(to + i + S::kWidth, b);
  }
  for (; i < count; ++i) to[i] = to_float(from[i]);
}

template <class S, class T>
void narrow(const float* from, int64_t count, T* to) {
  int64_t i = 0;
  for (; i + kUnit<S> <= count; i += kUnit<S>) {
    auto a = S::load(from + i), b = S::load(from + i + S::kWidth);
    S::template bend<T>(a, b);
    S::store2(to + i, a, b);
  }
  for (; i < count; ++i) from_float(from[i], to[i]);
}

// Calls tile(number of heads, first head) for tiles of kHeads, and of fewer at the end.
template <int kHeads, class F>
void head_tiles(int64_t first, int64_t heads, const F& tile) {
  for (; first + kHeads <= heads; first += kHeads) tile(std::integral_constant<int, kHeads>{}, first);
  if constexpr (kHeads > 1) {
    if (first < heads) head_tiles<kHeads - 1>(first, heads, tile);
  }
}

// scores[h][0..4) = q[h] . rows[0..4), all of `width` floats
template <class S, int kHeads>
void score_tile(const float* q, const float* rows, int64_t width, float* scores) {
  typename S::V sum[kHeads][kKeys];
  for (int h = 0; h < kHeads; ++h)
    for (int k = 0; k < kKeys; ++k) sum[h][k] = S::zero();
  for (int64_t d = 0; d < width; d += S::kWidth) {
    typename S::V row[kKeys];
    for (int k = 0; k < kKeys; ++k) row[k] = S::load(rows + k * width + d);
    for (int h = 0; h < kHeads; ++h) {
      const auto x = S::load(q + h * width + d);
      for (int k = 0; k < kKeys; ++k) sum[h][k] = S::fma(row[k], x, sum[h][k]);
    }
  }
  for (int h = 0; h < kHeads; ++h) S::sum4(sum[h][0], sum[h][1], sum[h][2], sum[h][3], scores + h * kMlaRows);
}

// values[h][0..kVectors vectors) += weights[h] . rows
template <class S, int kHeads, int kVectors>
void value_tile(const float* rows, int64_t width, int64_t count, const float* weights, float* values, int64_t stride) {
  typename S::V sum[kHeads][kVectors];
  for (int h = 0; h < kHeads; ++h)
    for (int u = 0; u < kVectors; ++u) sum[h][u] = S::load(values + h * stride + u * S::kWidth);
  for (int64_t i = 0; i < count; ++i, rows += width) {
    typename S::V row[kVectors];
    for (int u = 0; u < kVectors; ++u) row[u] = S::load(rows + u * S::kWidth);
    for (int h = 0; h < kHeads; ++h) {
      const auto weight = S::set(weights[h * kMlaRows + i]);
      for (int u = 0; u < kVectors; ++u) sum[h][u] = S::fma(row[u], weight, sum[h][u]);
    }
  }
  for (int h = 0; h < kHeads; ++h)
    for (int u = 0; u < kVectors; ++u) S::store(values + h * stride + u * S::kWidth, sum[h][u]);
}

// One head of one block: scores into weights relative to the largest so far. What was summed relative to a smaller one
// is brought down.
template <class S>
void soften(float* scores, int64_t count, float& maximum, float& total, float* values, int64_t columns) {
  const int64_t padded_count = rounded_to_vectors<S>(count);
  for (int64_t i = count; i < padded_count; ++i) scores[i] = -kInfinity;
  auto top = S::load(scores);
  for (int64_t i = S::kWidth; i < padded_count; i += S::kWidth) top = S::max(top, S::load(scores + i));
  const float highest = S::reduce_max(top);
  if (!(highest <= maximum)) {
    const float factor = exp2_of<S>(maximum - highest);
    maximum = highest, total *= factor;
    for (int64_t d = 0; d < columns; d += S::kWidth) S::store(values + d, S::mul(S::load(values + d), S::set(factor)));
  }
  auto sum = S::zero();
  for (int64_t i = 0; i < padded_count; i += S::kWidth) {
    const auto weight = exp2<S>(S::sub(S::load(scores + i), S::set(maximum)));
    S::store(scores + i, weight);
    sum = S::add(sum, weight);
  }
  total += S::reduce_add(sum);
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
        row_elements_(args.latent + args.rotary),
        width_(padded<S>(row_elements_)),
        columns_(padded<S>(args.latent)),
        q_(scratch),
        rows_(q_ + heads_ * width_),
        scores_(rows_ + kMlaRows * width_) {}

  void run() {
    pack_queries();
    std::memset(rows_, 0, static_cast<size_t>(kMlaRows * width_) * sizeof(float));
    std::memset(part_.values, 0, static_cast<size_t>(heads_ * columns_) * sizeof(float));
    for (int64_t h = 0; h < heads_; ++h) part_.maximum[h] = -kInfinity, part_.sum[h] = 0.0f;
    LatentRun runs[kMlaChunk];
    const int64_t row_bytes = row_elements_ * static_cast<int64_t>(sizeof(T));
    Lead lead(runs, find_runs(runs), row_bytes);
    // The lead is a block ahead: the first comes with its own widening, each later one while its forerunner is summed.
    const LatentRun* run = runs;
    int64_t at_run = 0;
    for (int64_t at = piece_.begin; at < piece_.end; at += kMlaRows) {
      const int64_t count = piece_.end - at < kMlaRows ? piece_.end - at : kMlaRows;
      for (int64_t i = 0; i < count; ++i) {
        if (at == piece_.begin) lead.pass(row_bytes);
        widen<S>(reinterpret_cast<const T*>(run->rows + at_run * row_bytes), row_elements_, rows_ + i * width_);
        if (++at_run == run->count) ++run, at_run = 0;
      }
      score(count, lead, row_bytes);
      for (int64_t h = 0; h < heads_; ++h)
        soften<S>(scores_ + h * kMlaRows, count, part_.maximum[h], part_.sum[h], part_.values + h * columns_, columns_);
      value(count);
    }
  }

 private:
  void pack_queries() {
    const T* latent = static_cast<const T*>(args_.q_latent) + piece_.sequence * args_.q_latent_stride;
    const T* rotary = static_cast<const T*>(args_.q_rotary) + piece_.sequence * args_.q_rotary_stride;
    const auto factor = S::set(args_.scale * kLog2E);
    for (int64_t h = 0; h < heads_; ++h) {
      float* to = q_ + h * width_;
      widen<S>(latent + (piece_.first_head + h) * args_.latent, args_.latent, to);
      widen<S>(rotary + (piece_.first_head + h) * args_.rotary, args_.rotary, to + args_.latent);
      for (int64_t i = row_elements_; i < width_; ++i) to[i] = 0.0f;
      for (int64_t i = 0; i < width_; i += S::kWidth) S::store(to + i, S::mul(S::load(to + i), factor));
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

  // A short last tile takes rows of the block before, or zeros: nobody reads its scores beyond `count`.
  void score(int64_t count, Lead& lead, int64_t row_bytes) {
    const int64_t ahead = kNearRows * row_bytes / heads_ + 1;  // of each head and each near group
    for (int64_t near = 0; near < count; near += kNearRows) {
      const int64_t end = near + kNearRows < count ? near + kNearRows : count;
      head_tiles<S::kHeadTile>(0, heads_, [&](auto size, int64_t h) {
        lead.pass(ahead * size);
        for (int64_t i = near; i < end; i += kKeys)
          score_tile<S, size>(q_ + h * width_, rows_ + i * width_, width_, scores_ + h * kMlaRows + i);
      });
    }
  }

  void value(int64_t count) {
    int64_t d = 0;
    for (; d + kTileVectors * S::kWidth <= columns_; d += kTileVectors * S::kWidth) value<kTileVectors>(d, count);
    for (; d < columns_; d += S::kWidth) value<1>(d, count);
  }
  template <int kVectors>
  void value(int64_t d, int64_t count) {
    head_tiles<S::kHeadTile>(0, heads_, [&](auto size, int64_t h) {
      value_tile<S, size, kVectors>(rows_ + d, width_, count, scores_ + h * kMlaRows, part_.values + h * columns_ + d,
                                    columns_);
    });
  }

  const MlaArgs& args_;
  const MlaPiece& piece_;
  const Partial& part_;
  const int64_t heads_, row_elements_, width_, columns_;
  float *const q_, *const rows_, *const scores_;
};

template <class S, class T>
void attend(const MlaArgs& args, const MlaPiece& piece, float* scratch, const Partial& part) {
  Sweep<S, T>(args, piece, scratch, part).run();
}

template <class S, class T>
void merge(const MlaArgs& args, const MlaPiece& piece, const Partial* parts, int64_t count) {
  const int64_t columns = padded<S>(args.latent);
  T* out = static_cast<T*>(args.out) + piece.sequence * args.out_stride + piece.first_head * args.latent;
  for (int64_t h = 0; h < piece.last_head - piece.first_head; ++h, out += args.latent) {
    const auto inverse = S::set(1.0f / factors<S>(parts, count, h, -kInfinity));
    float* joined = parts[0].values + h * columns;
    for (int64_t d = 0; d < columns; d += S::kWidth) {
      auto sum = S::zero();
      for (int64_t c = 0; c < count; ++c)
        sum = S::fma(S::set(parts[c].maximum[h]), S::load(parts[c].values + h * columns + d), sum);
      S::store(joined + d, S::mul(sum, inverse));
    }
    narrow<S>(joined, args.latent, out);
  }
}

template <class S>
const MlaKernels& kernels() {
  static const MlaKernels table = {.pad = kUnit<S>,
                                   .attend = {attend<S, float>, attend<S, Bf16>, attend<S, Fp16>},
                                   .merge = {merge<S, float>, merge<S, Bf16>, merge<S, Fp16>}};
  return table;
}

}  // namespace
}  // namespace moelight
