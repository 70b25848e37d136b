// The one algorithm of decode attention, over products M (floats.h, pairs.h), which name their SIMD type. Included once
// by each instruction set's file; all of it has internal linkage. Two sweeps over a chunk: keys into scores, then,
// after the softmax, values into sums. Both read memory once and in its order, all heads of a block before the next
// block, and are bound by that: what lies next is fetched while they compute.
//
// The scale of an int8 key multiplies its scores, that of a value its weights.
#pragma once

#include <cstring>
#include <type_traits>

#include "ahead.h"
#include "floats.h"
#include "gqa.h"
#include "quantise.inl"
#include "softmax.inl"

namespace moelight {
namespace {

// Raw scores of one head into weights relative to their maximum: times `factor` and each key's scale, capped, softmax
// in base 2. Those behind `count`, to the next whole unit, weigh next to nothing. Returns maximum and sum of weights.
// `share` bytes are asked for meanwhile.
template <class S>
void soften(float* scores, int64_t count, float factor, float softcap, const float* key_scales, float& maximum,
            float& total, const Prefetch& ahead, int64_t share) {
  const int64_t padded_count = padded<S>(count);
  const auto wide = S::set(factor), cap = S::set(softcap * kLog2E);
  auto top = S::set(-kInfinity);
  for (int64_t i = count; i < padded_count; ++i) scores[i] = 0.0f;
  for (int64_t i = 0; i < count; i += S::kWidth) {
    auto x = S::mul(S::load(scores + i), wide);
    if (key_scales != nullptr) x = S::mul(x, S::load(key_scales + i));
    if (softcap > 0.0f) x = S::mul(tanh<S>(x), cap);
    S::store(scores + i, x);
    if (i + S::kWidth <= count) top = S::max(top, x);
  }
  for (int64_t i = count; i < padded_count; ++i) scores[i] = -kInfinity;
  for (int64_t i = count / S::kWidth * S::kWidth; i < padded_count; i += S::kWidth)
    top = S::max(top, S::load(scores + i));
  maximum = S::reduce_max(top);
  auto sum = S::zero();
  const int64_t step = share * S::kWidth / padded_count;
  int64_t byte = 0;
  for (int64_t i = 0; i < padded_count; i += S::kWidth, byte += step) {
    ahead(byte);
    const auto weight = exp2<S>(S::sub(S::load(scores + i), S::set(maximum)));
    sum = S::add(sum, weight);
    S::store(scores + i, weight);
  }
  total = S::reduce_add(sum);
}

// Calls tile(number of heads, first head) for tiles of kHeads, and of fewer at the end.
template <int kHeads, class F>
void head_tiles(int64_t first, int64_t heads, const F& tile) {
  for (; first + kHeads <= heads; first += kHeads) tile(std::integral_constant<int, kHeads>{}, first);
  if constexpr (kHeads > 1) {
    if (first < heads) head_tiles<kHeads - 1>(first, heads, tile);
  }
}

// The memory of one piece while it is summed.
template <class M>
class AttendPiece {
  using S = typename M::Lanes;
  using Q = typename M::Query;
  using T = typename M::Stored;
  using Word = typename M::Word;
  static constexpr bool kScaled = std::is_same_v<T, int8_t>;
  // Of 2 to 16 KiB: less is too late, more is slower beside a second thread. Blocks of int8 are half as long.
  static constexpr int64_t kLead = kScaled ? 6144 : 4096;

 public:
  AttendPiece(const GqaArgs& args, const GqaPiece& piece, float* scratch, const Partial& part)
      : args_(args),
        part_(part),
        group_(args.q_heads / args.kv_heads),
        kv_heads_(piece.last_head - piece.first_head),
        heads_(kv_heads_ * group_),
        stride_(padded<S>(args.head_dim)),
        count_(piece.end - piece.begin),
        head_bytes_(args.block_size * args.head_dim * static_cast<int64_t>(sizeof(T))),
        scores_(scratch),
        queries_(reinterpret_cast<Word*>(scores_ + heads_ * kScoreRow)),
        factors_(scores_ + heads_ * (kScoreRow + stride_)),
        scales_(factors_ + heads_),
        scout_(run_, runs_, kv_heads_, head_bytes_, args.head_dim * static_cast<int64_t>(sizeof(T))) {
    find_runs(piece);
    scout_.start(kLead);
    const Q* q = static_cast<const Q*>(args.q) + piece.sequence * args.q_stride;
    q += piece.first_head * group_ * args.head_dim;
    for (int64_t h = 0; h < heads_; ++h)
      factors_[h] = M::pack_query(q + h * args.head_dim, args.head_dim, queries_ + h * stride_);
  }

  void run() {
    int64_t at = 0;
    for (int64_t r = 0; r < runs_; at += run_[r++].count)
      for (int64_t h = 0; h < kv_heads_; ++h) {
        if constexpr (kScaled) touch_scales(run_[r], h);
        score(run_[r], h, at);
      }
    std::memset(part_.values, 0, static_cast<size_t>(heads_ * stride_) * sizeof(float));
    // The softmax of a head has memory to itself: it fetches the first values, unless it is too short for that.
    const int64_t bytes = run_[0].count * args_.head_dim * static_cast<int64_t>(sizeof(T));
    const bool fetches = bytes <= group_ * count_ * static_cast<int64_t>(sizeof(float));
    for (int64_t h = 0; h < kv_heads_; ++h) {
      soften_group(h, fetches ? bytes / group_ : 0);
      if (fetches) {
        weigh(run_[0], h, 0, NoPrefetch{});
      } else {
        weigh(run_[0], h, 0, scout_);
      }
    }
    at = run_[0].count;
    for (int64_t r = 1; r < runs_; at += run_[r++].count)
      for (int64_t h = 0; h < kv_heads_; ++h) weigh(run_[r], h, at, scout_);
    for (int64_t h = 0; h < heads_; ++h) M::finish(part_.values + h * stride_, stride_, factors_[h]);
  }

 private:
  void find_runs(const GqaPiece& piece) {
    const int32_t* table = args_.tables + piece.sequence * args_.table_stride;
    const int64_t size = args_.block_size, first = piece.first_head * size;
    constexpr auto kBytes = static_cast<int64_t>(sizeof(T));
    for (int64_t at = piece.begin; at < piece.end; at += run_[runs_++].count) {
      const int64_t block = table[at / size], offset = at % size, in_block = size - offset, left = piece.end - at;
      const int64_t row = first + offset;
      KvRun& run = run_[runs_];
      run.keys = static_cast<const char*>(args_.k_cache) + (block * args_.k_stride + row * args_.head_dim) * kBytes;
      run.values = static_cast<const char*>(args_.v_cache) + (block * args_.v_stride + row * args_.head_dim) * kBytes;
      if constexpr (kScaled) {
        run.key_scales = args_.k_scale + block * args_.k_scale_stride + row;
        run.value_scales = args_.v_scale + block * args_.v_scale_stride + row;
      }
      run.count = in_block < left ? in_block : left;
    }
  }

  void touch_scales(const KvRun& run, int64_t h) const {
    for (int64_t i = 0; i < run.count; i += kLineBytes / static_cast<int64_t>(sizeof(float))) {
      __builtin_prefetch(run.key_scales + h * args_.block_size + i);
      __builtin_prefetch(run.value_scales + h * args_.block_size + i);
    }
  }

  // A short last tile repeats its last row; what it writes beyond the run is overwritten by the next run or by the
  // softmax's padding, and at the end of a chunk falls into the row's slack.
  void score(const KvRun& run, int64_t h, int64_t at) {
    const auto* rows = reinterpret_cast<const T*>(run.keys + h * head_bytes_);
    const int64_t head_dim = args_.head_dim, bytes = head_dim * static_cast<int64_t>(sizeof(T));
    const Word* q = queries_ + h * group_ * stride_;
    float* scores = scores_ + h * group_ * kScoreRow + at;
    for (int64_t i = 0; i < run.count; i += kKeys) {
      const T* row[kKeys];
      for (int64_t j = 0; j < kKeys; ++j) row[j] = rows + (i + j < run.count ? i + j : run.count - 1) * head_dim;
      const Prefetch ahead = scout_.take(kKeys * bytes);
      head_tiles<M::kHeadTile>(0, group_, [&](auto heads, int64_t first) {
        if (first == 0) {
          M::template score<heads>(row, q, head_dim, scores + i, ahead);
        } else {
          M::template score<heads>(row, q + first * stride_, head_dim, scores + first * kScoreRow + i, NoPrefetch{});
        }
      });
    }
  }

  void soften_group(int64_t kv_head, int64_t share) {
    float *key_scales = nullptr, *value_scales = nullptr;
    if constexpr (kScaled) {
      key_scales = scales_, value_scales = scales_ + kScoreRow;
      gather_scales(kv_head, key_scales, value_scales);
    }
    const float scale = args_.softcap > 0 ? args_.scale / args_.softcap : args_.scale * kLog2E;
    for (int64_t h = kv_head * group_; h < (kv_head + 1) * group_; ++h) {
      float* scores = scores_ + h * kScoreRow;
      soften<S>(scores, count_, factors_[h] * scale, args_.softcap, key_scales, part_.maximum[h], part_.sum[h],
                scout_.take(share), share);
      factors_[h] = M::pack_weights(scores, padded<S>(count_), value_scales, part_.sum[h]);
    }
  }

  // Side by side; what lies between the end of the piece and the next whole unit is zero.
  void gather_scales(int64_t h, float* keys, float* values) const {
    int64_t at = 0;
    for (int64_t r = 0; r < runs_; at += run_[r++].count) {
      const auto bytes = static_cast<size_t>(run_[r].count) * sizeof(float);
      std::memcpy(keys + at, run_[r].key_scales + h * args_.block_size, bytes);
      std::memcpy(values + at, run_[r].value_scales + h * args_.block_size, bytes);
    }
    for (; at < padded<S>(count_); ++at) keys[at] = values[at] = 0.0f;
  }

  template <class N>
  void weigh(const KvRun& run, int64_t h, int64_t at, N&& next) const {
    const auto* rows = reinterpret_cast<const T*>(run.values + h * head_bytes_);
    head_tiles<M::kWeighedHeads>(h * group_, (h + 1) * group_, [&](auto heads, int64_t first) {
      const Word* weights = reinterpret_cast<const Word*>(scores_ + first * kScoreRow) + at;
      float* values = part_.values + first * stride_;
      if (first == h * group_) {
        M::template weigh<heads>(rows, run.count, weights, args_.head_dim, values, next);
      } else {
        M::template weigh<heads>(rows, run.count, weights, args_.head_dim, values, NoPrefetch{});
      }
    });
  }

  const GqaArgs& args_;
  const Partial& part_;
  const int64_t group_, kv_heads_, heads_, stride_, count_, head_bytes_;
  float* const scores_;
  Word* const queries_;
  float *const factors_, *const scales_;
  int64_t runs_ = 0;
  KvRun run_[kChunk / kBlockSizes[0] + 1];
  Scout scout_;
};

template <class M>
void attend(const GqaArgs& args, const GqaPiece& piece, float* scratch, const Partial& part) {
  AttendPiece<M>(args, piece, scratch, part).run();
}

template <class M>
void merge(const GqaArgs& args, const GqaPiece& piece, const Partial* parts, int64_t count) {
  using S = typename M::Lanes;
  const int64_t group = args.q_heads / args.kv_heads, head_dim = args.head_dim, stride = padded<S>(head_dim);
  const int64_t first = piece.first_head * group, heads = piece.last_head * group - first;
  auto* out = static_cast<typename M::Query*>(args.out) + piece.sequence * args.out_stride + first * head_dim;
  for (int64_t h = 0; h < heads; ++h, out += head_dim) {
    const float sink = args.sinks == nullptr ? -kInfinity : args.sinks[first + h] * kLog2E;
    const auto inverse = S::set(1.0f / factors<S>(parts, count, h, sink));
    for (int64_t d = 0; d < head_dim; d += kUnit<S>) {
      auto a = S::zero(), b = S::zero();
      for (int64_t c = 0; c < count; ++c) {
        const auto factor = S::set(parts[c].maximum[h]);
        const float* values = parts[c].values + h * stride + d;
        a = S::fma(factor, S::load(values), a);
        b = S::fma(factor, S::load(values + S::kWidth), b);
      }
      M::write(out + d, head_dim - d, S::mul(a, inverse), S::mul(b, inverse));
    }
  }
}

// B: the products of bf16 with bf16; I: of bf16 or fp16 with int8.
template <class S, class B, template <class> class I>
const GqaKernels& kernels() {
  using F = FloatProducts<S, float, float>;
  using H = FloatProducts<S, Fp16, Fp16>;
  using Exact = FloatProducts<S, float, int8_t>;
  static const GqaKernels table = {.pad = kUnit<S>,
                                   .attend = {attend<F>, attend<B>, attend<H>},
                                   .attend_int8 = {attend<Exact>, attend<I<Bf16>>, attend<I<Fp16>>},
                                   .merge = {merge<F>, merge<B>, merge<H>},
                                   .merge_int8 = {merge<Exact>, merge<I<Bf16>>, merge<I<Fp16>>},
                                   .quantise = {quantise<float>, quantise<Bf16>, quantise<Fp16>}};
  return table;
}

template <class S>
struct AllFloats {
  using B = FloatProducts<S, Bf16, Bf16>;
  template <class Q>
  using I = FloatProducts<S, Q, int8_t>;
};

template <class S>
const GqaKernels& float_kernels() {
  return kernels<S, typename AllFloats<S>::B, AllFloats<S>::template I>();
}

}  // namespace
}  // namespace moelight
