// The algorithm of prefill attention over a layout M (wide.h, dots.h), which names its SIMD type; that over tiles is in
// tiles.h. Included once by each instruction set's file; all of it has internal linkage.
//
// A tile of queries passes over the keys block by block: products with the keys, the online softmax, products of its
// weights with the values. Blocks begin at fixed positions of the sequence. A block that a row does not see leaves the
// row's sums as they are, bit for bit; so a row depends on its own position and the keys before it, and neither on the
// tile nor on whether earlier keys lie in the cache or in the prompt.

#include <cstring>

#include "prefill.h"
#include "product.h"
#include "softmax.h"
#include "wide.h"

namespace moelight {
namespace {

// Where the keys and values lie that the queries of a tile see, kBlock of them at a time.
template <class T, int64_t kBlock>
class PromptKeys {
 public:
  PromptKeys(const PrefillArgs& args, const QueryTile& tile)
      : args_(args),
        tile_(tile),
        heads_(args.q_heads / args.kv_heads),
        rows_((tile.end - tile.begin) * heads_),
        context_(args.context ? args.context[tile.sequence] : 0) {}
  // Of rows of the cache in the dtype of the queries.
  static int64_t widened_floats(int64_t head_dim) { return 2 * kBlock * head_dim; }

 protected:
  static constexpr int64_t kAligned = 16;

  int64_t first_seen(int64_t position) const {
    return args_.window > 0 && position >= args_.window ? position - args_.window + 1 : 0;
  }

  // The element where a row's query begins, and its output.
  int64_t offset(int64_t row, int64_t stride) const {
    const int64_t token = args_.bounds[tile_.sequence] + tile_.begin + row / heads_;
    return token * stride + (tile_.kv_head * heads_ + row % heads_) * args_.head_dim;
  }

  // pass(block, first key that is seen, keys) for every block.
  template <class Pass>
  void each_block(const Pass& pass) {
    const int64_t first = first_seen(context_ + tile_.begin), last = context_ + tile_.end;
    for (int64_t block = first / kBlock * kBlock; block < last; block += kBlock)
      pass(block, first > block ? first : block, last - block < kBlock ? last - block : kBlock);
  }

  // One row of the cache in the dtype of the queries, in a place of its own.
  const T* widen(const int8_t* row, float scale, int64_t slot) const {
    T* const wide = widened_ + slot * args_.head_dim;
    for (int64_t d = 0; d < args_.head_dim; ++d) from_float(static_cast<float>(row[d]) * scale, wide[d]);
    return wide;
  }

  // Where the keys and values of positions [block, block + count) lie; those before `from` are seen by nobody, perhaps
  // not even there, and stand for nothing: `from` takes their places. Places behind the last repeat it.
  void find(int64_t block, int64_t from, int64_t count, int64_t places) {
    const int64_t head_dim = args_.head_dim, row = tile_.kv_head * head_dim;
    int64_t i = from - block;
    while (i < count) {
      const int64_t position = block + i;
      if (position >= context_) {
        const int64_t token = args_.bounds[tile_.sequence] + position - context_;
        const T* k = static_cast<const T*>(args_.k) + token * args_.k_stride + row;
        const T* v = static_cast<const T*>(args_.v) + token * args_.v_stride + row;
        for (; i < count; ++i, k += args_.k_stride, v += args_.v_stride) k_rows_[i] = k, v_rows_[i] = v;
        break;
      }
      const int64_t index = position / args_.block_size, within = position % args_.block_size;
      const int64_t page = args_.tables[tile_.sequence * args_.table_stride + index];
      const int64_t slot = tile_.kv_head * args_.block_size + within;
      const int64_t in_block = args_.block_size - within, left = context_ - position;
      const int64_t run = in_block < left ? in_block : left, stop = i + run < count ? i + run : count;
      const int64_t k_at = page * args_.k_cache_stride + slot * head_dim;
      const int64_t v_at = page * args_.v_cache_stride + slot * head_dim;
      if (args_.k_scale) {
        const float* const k_scale = args_.k_scale + page * args_.k_scale_stride + slot;
        const float* const v_scale = args_.v_scale + page * args_.v_scale_stride + slot;
        for (int64_t j = 0; i < stop; ++i, ++j) {
          const int64_t row_at = j * head_dim;
          k_rows_[i] = widen(static_cast<const int8_t*>(args_.k_cache) + k_at + row_at, k_scale[j], i);
          v_rows_[i] = widen(static_cast<const int8_t*>(args_.v_cache) + v_at + row_at, v_scale[j], kBlock + i);
        }
      } else {
        const T* k = static_cast<const T*>(args_.k_cache) + k_at;
        const T* v = static_cast<const T*>(args_.v_cache) + v_at;
        for (; i < stop; ++i, k += head_dim, v += head_dim) k_rows_[i] = k, v_rows_[i] = v;
      }
    }
    for (i = 0; i < from - block; ++i) k_rows_[i] = k_rows_[from - block], v_rows_[i] = v_rows_[from - block];
    for (i = count; i < places; ++i) k_rows_[i] = k_rows_[count - 1];
  }

  KeyRange seen(int64_t row, int64_t block, int64_t places) const {
    const int64_t position = context_ + tile_.begin + row / heads_;
    const int64_t low = first_seen(position) - block, high = position + 1 - block;
    return {low > 0 ? low : 0, high < places ? high : places};
  }

  const PrefillArgs& args_;
  const QueryTile& tile_;
  const int64_t heads_, rows_, context_;
  T* widened_;
  const T *k_rows_[kBlock], *v_rows_[kBlock];
};

template <class M>
class AttendPrompt : PromptKeys<typename M::Stored, kKeyBlock> {
  using S = typename M::Lanes;
  using T = typename M::Stored;
  using Keys = PromptKeys<T, kKeyBlock>;
  using Keys::args_, Keys::tile_, Keys::heads_, Keys::rows_, Keys::widened_, Keys::k_rows_, Keys::v_rows_;
  using Keys::kAligned, Keys::offset, Keys::find, Keys::seen;

 public:
  static int64_t scratch_floats(int64_t head_dim, int64_t rows) {
    const int64_t depth = M::depth(head_dim), lanes = M::lanes(head_dim), padded_rows = padded(rows);
    return padded_rows * (depth + kPromptScoreRow + lanes + S::kWidth + 2) + kKeyBlock * (depth + lanes) +
           Keys::widened_floats(head_dim) + S::kWidth * depth + 10 * kAligned;
  }

  AttendPrompt(const PrefillArgs& args, const QueryTile& tile, float* scratch)
      : Keys(args, tile),
        padded_rows_(padded(rows_)),
        depth_(M::depth(args.head_dim)),
        lanes_(M::lanes(args.head_dim)) {
    const auto take = [&](int64_t floats) {
      float* const taken = scratch;
      scratch += (floats + kAligned - 1) / kAligned * kAligned;
      return taken;
    };
    queries_ = take(padded_rows_ * depth_);
    scores_ = take(padded_rows_ * kPromptScoreRow);
    sums_ = take(padded_rows_ * lanes_);
    total_ = take(padded_rows_ * S::kWidth);
    maximum_ = take(padded_rows_);
    factor_ = take(padded_rows_);
    keys_ = take(kKeyBlock * depth_);
    values_ = take(kKeyBlock * lanes_);
    staging_ = take(S::kWidth * depth_);
    widened_ = reinterpret_cast<T*>(take(Keys::widened_floats(args.head_dim)));
  }

  void run() {
    begin();
    Keys::each_block([&](int64_t block, int64_t from, int64_t count) { pass(block, from, count); });
    finish();
  }

 private:
  static int64_t padded(int64_t rows) { return (rows + S::kTileRows - 1) / S::kTileRows * S::kTileRows; }

  void begin() {
    std::memset(sums_, 0, static_cast<size_t>(padded_rows_ * lanes_) * sizeof(float));
    std::memset(total_, 0, static_cast<size_t>(padded_rows_ * S::kWidth) * sizeof(float));
    for (int64_t r = 0; r < rows_; ++r) {
      M::pack_query(static_cast<const T*>(args_.q) + offset(r, args_.q_stride), args_.head_dim, queries_ + r * depth_);
      maximum_[r] = kLowest;
      if (!args_.sinks) continue;
      maximum_[r] = args_.sinks[tile_.kv_head * heads_ + r % heads_] * kLog2E;
      total_[r * S::kWidth] = 1.0f;
    }
    for (int64_t r = rows_; r < padded_rows_; ++r) {
      std::memset(queries_ + r * depth_, 0, static_cast<size_t>(depth_) * sizeof(float));
      maximum_[r] = kLowest;
    }
  }

  void pass(int64_t block, int64_t from, int64_t count) {
    const int64_t places = (count + M::kUnit - 1) / M::kUnit * M::kUnit;
    find(block, from, count, places);
    for (int64_t i = 0; i < places; i += S::kWidth) M::pack_keys(k_rows_ + i, args_.head_dim, staging_, keys_ + i);
    M::pack_values(v_rows_, count, args_.head_dim, values_);
    multiply<M>({queries_, depth_, padded_rows_, depth_, keys_, kKeyBlock, places, scores_, kPromptScoreRow, nullptr});
    const Logits<S> logits(args_.scale, args_.softcap);
    for (int64_t r = 0; r < padded_rows_; ++r) {
      const KeyRange span = r < rows_ ? seen(r, block, places) : KeyRange{0, 0};
      soften<M>(logits, scores_ + r * kPromptScoreRow, span, places,
                {maximum_ + r, total_ + r * S::kWidth, factor_ + r});
    }
    const int64_t words = (count + M::kKeysPerWord - 1) / M::kKeysPerWord;
    multiply<M>({scores_, kPromptScoreRow, padded_rows_, words, values_, lanes_, lanes_, sums_, lanes_, factor_});
  }

  void finish() const {
    for (int64_t r = 0; r < rows_; ++r) {
      const auto factor = S::set(1.0f / S::reduce_add(S::load(total_ + r * S::kWidth)));
      M::finish(sums_ + r * lanes_, factor, args_.head_dim, static_cast<T*>(args_.out) + offset(r, args_.out_stride));
    }
  }

  const int64_t padded_rows_, depth_, lanes_;
  float *queries_, *scores_, *sums_, *total_, *maximum_, *factor_, *keys_, *values_, *staging_;
};

template <class M>
void attend(const PrefillArgs& args, const QueryTile& tile, float* scratch) {
  AttendPrompt<M>(args, tile, scratch).run();
}

// B16: the layout of bf16 products.
template <class S, class B16 = Wide<S, Bf16>>
const PrefillKernels& kernels() {
  const auto scratch_floats = [](int64_t head_dim, int64_t rows) {
    const int64_t wide = AttendPrompt<Wide<S, float>>::scratch_floats(head_dim, rows);
    const int64_t b16 = AttendPrompt<B16>::scratch_floats(head_dim, rows);
    return wide > b16 ? wide : b16;
  };
  static const PrefillKernels table = {scratch_floats, {attend<Wide<S, float>>, attend<B16>, attend<Wide<S, Fp16>>}};
  return table;
}

}  // namespace
}  // namespace moelight
