// Prompt attention of bf16 over tiles (tiles/attention.h). Internal linkage.
//
// The queries of a tile, all heads of their group, are the lanes. Blocks of keys begin at fixed positions here, too,
// and one that a lane does not see leaves its sums as they are.
#pragma once

#include "dots.h"
#include "kernel.inl"
#include "tiles/attention.h"

namespace moelight {
namespace {

template <class Tile>
class AttendInTiles : PromptKeys<Bf16, kTileKeys> {
  using Keys = PromptKeys<Bf16, kTileKeys>;
  using S = PrefillAvx512;
  using Attention = TileAttention<Tile>;

 public:
  static int64_t scratch_floats(int64_t head_dim, int64_t rows) {
    return Attention::scratch_floats(rows, head_dim, head_dim) + Keys::widened_floats(head_dim) + 2 * (rows + 15);
  }

  AttendInTiles(const PrefillArgs& args, const QueryTile& tile, float* scratch)
      : Keys(args, tile), attention_(rows_, args.head_dim, args.head_dim, scratch) {
    scratch += Attention::scratch_floats(rows_, args.head_dim, args.head_dim);
    widened_ = reinterpret_cast<Bf16*>(scratch), scratch += Keys::widened_floats(args.head_dim);
    low_ = reinterpret_cast<int32_t*>(scratch), span_ = low_ + attention_.lanes();
  }

  void run() {
    begin();
    const Logits<S> logits(args_.scale, args_.softcap);
    bool first = true;
    Keys::each_block([&](int64_t block, int64_t from, int64_t count) {
      Keys::find(block, from, count, count);
      const bool hides = mark(block, count);
      const auto pass = [&](const auto& hide) {
        attention_.pass(k_rows_, v_rows_, count, first, [&](__m512 x) { return logits(x); }, hide);
      };
      if (hides) {
        pass([&](int64_t b, int64_t key, __m512 x, float other) {
          const __m512i after = _mm512_sub_epi32(_mm512_set1_epi32(static_cast<int>(key)), load(low_, b));
          return _mm512_mask_mov_ps(S::set(other), _mm512_cmpgt_epu32_mask(load(span_, b), after), x);
        });
      } else {
        pass([](int64_t, int64_t, __m512 x, float) { return x; });
      }
      first = false;
    });
    finish();
  }

 private:
  static __m512i load(const int32_t* lanes, int64_t block) { return _mm512_loadu_si512(lanes + 16 * block); }

  void begin() const {
    for (int64_t block = 0; 16 * block < rows_; ++block) {
      const Bf16* queries[16] = {};
      for (int64_t i = 0; i < 16; ++i) {
        const int64_t row = 16 * block + i;
        const bool sinks = row < rows_ && args_.sinks != nullptr;
        if (row < rows_) queries[i] = static_cast<const Bf16*>(args_.q) + Keys::offset(row, args_.q_stride);
        attention_.maximum()[row] = sinks ? args_.sinks[tile_.kv_head * heads_ + row % heads_] * kLog2E : kLowest;
        attention_.total()[row] = sinks ? 1.0f : 0.0f;
      }
      attention_.pack_queries(block, queries);
    }
  }

  // Which keys of a block every lane sees; whether some lane does not see them all.
  bool mark(int64_t block, int64_t count) const {
    bool hides = false;
    for (int64_t row = 0; row < rows_; ++row) {
      const KeyRange range = Keys::seen(row, block, count);
      const int64_t seen = std::max<int64_t>(range.end - range.begin, 0);
      low_[row] = static_cast<int32_t>(range.begin), span_[row] = static_cast<int32_t>(seen);
      hides = hides || seen < count;
    }
    for (int64_t row = rows_; row < attention_.lanes(); ++row) low_[row] = span_[row] = 0;
    return hides;
  }

  void finish() const {
    for (int64_t row = 0; row < rows_; ++row) {
      float line[kMaxPrefillHeadDim];
      for (int64_t unit = 0; 32 * unit < args_.head_dim; ++unit) {
        __m512 a, b;
        attention_.sums(row, unit, a, b);
        S::store(line + 32 * unit, a), S::store(line + 32 * unit + 16, b);
      }
      Dots::finish(line, S::set(1.0f / attention_.total()[row]), args_.head_dim,
                   static_cast<Bf16*>(args_.out) + Keys::offset(row, args_.out_stride));
    }
  }

  Attention attention_;
  int32_t *low_, *span_;
};

template <class Tile>
void attend_in_tiles(const PrefillArgs& args, const QueryTile& tile, float* scratch) {
  Tile::configure();
  AttendInTiles<Tile>(args, tile, scratch).run();
  Tile::leave();
}

template <class Tile>
const PrefillKernels& tile_kernels() {
  static const PrefillKernels table = [] {
    PrefillKernels kernels = moelight::kernels<PrefillAvx512>();
    kernels.attend[static_cast<int>(DType::kBFloat16)] = attend_in_tiles<Tile>;
    kernels.scratch_floats = [](int64_t head_dim, int64_t rows) {
      return std::max(AttendPrompt<Wide<PrefillAvx512, float>>::scratch_floats(head_dim, rows),
                      AttendInTiles<Tile>::scratch_floats(head_dim, rows));
    };
    return kernels;
  }();
  return table;
}

}  // namespace
}  // namespace moelight
