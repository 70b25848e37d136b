// Attention of bf16 queries over a tile type: AMX's or emulated (csrc/tiles). Internal linkage.
//
// Keys are the left operand where they lie, queries the right one, packed once: scores are [key][query], so that the
// softmax is one of lanes. Weights of two keys are rounded to pairs, sixteen of which are transposed in registers: the
// left operand of the values, which are joined two keys at a time. Their columns lie as unpacking leaves them within 32
// until the end. Sums take the keys of a block in order, and leave their tiles once for a block.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "moelight/exp2.h"
#include "moelight/half.h"
#include "moelight/simd_avx512.h"
#include "moelight/transpose_avx512.h"
#include "tiles/pairs.h"

namespace moelight {
namespace {

constexpr int64_t kTileKeys = 256;  // of a block
constexpr float kHidden = std::numeric_limits<float>::lowest();

// Of 32 columns, half as unpacking leaves the lower parts of two keys, half the upper ones, those in order.
struct ColumnOrder {
  int32_t index[32] = {};
  constexpr ColumnOrder() {
    for (int i = 0; i < 32; ++i) index[i] = i / 4 % 2 * 16 + i / 8 * 4 + i % 4;
  }
};
alignas(64) constexpr ColumnOrder kColumnOrder;

template <class Tile>
class TileAttention {
 public:
  using S = Avx512;

  // Of `queries` of `depth` numbers each, and values of `columns`.
  TileAttention(int64_t queries, int64_t depth, int64_t columns, float* scratch)
      : blocks_((queries + 15) / 16),
        depth_(depth),
        steps_((depth + 31) / 32),
        columns_(columns),
        units_((columns + 31) / 32) {
    const auto take = [&](int64_t floats) {
      float* const taken = scratch;
      scratch += floats;
      return taken;
    };
    queries_ = take(blocks_ * steps_ * kTile), scores_ = take(blocks_ * kTileKeys * 16);
    weights_ = take(blocks_ * kKeySteps * kTile), values_ = take(kKeySteps * units_ * 2 * kTile);
    sums_ = take(units_ * blocks_ * 2 * kTile), copied_ = take(kTileKeys * steps_ * 16);
    maximum_ = take(blocks_ * 16), total_ = take(blocks_ * 16), factor_ = take(blocks_ * 16);
  }
  static int64_t scratch_floats(int64_t queries, int64_t depth, int64_t columns) {
    const int64_t blocks = (queries + 15) / 16, steps = (depth + 31) / 32, units = (columns + 31) / 32;
    return blocks * (steps * kTile + kTileKeys * 16 + kKeySteps * kTile + units * 2 * kTile + 48) +
           kKeySteps * units * 2 * kTile + kTileKeys * steps * 16;
  }

  int64_t lanes() const { return 16 * blocks_; }
  float* maximum() const { return maximum_; }  // of each lane, in base 2
  float* total() const { return total_; }      // of its weights
  // Room for sixteen queries, as long as no keys were taken.
  Bf16* spare() const { return reinterpret_cast<Bf16*>(copied_); }

  // Queries of one block, null beyond the last.
  void pack_queries(int64_t block, const Bf16* const (&rows)[16]) const {
    float* to = queries_ + block * steps_ * kTile;
    for (int64_t d = 0; d < depth_; d += 32, to += kTile) {
      __m512i words[16];
      for (int64_t i = 0; i < 16; ++i)
        words[i] = rows[i] == nullptr ? _mm512_setzero_si512() : load(rows[i] + d, depth_ - d);
      transpose16(words, to, 16);
    }
  }

  // A block of keys: logit(products of sixteen queries) as they are, or hide(block of queries, key, them, other), which
  // puts `other` in the place of what its query does not see.
  template <class Logit, class Hide>
  void pass(const Bf16* const* keys, const Bf16* const* values, int64_t count, bool begin, const Logit& logit,
            const Hide& hide) {
    key_steps_ = (count + 31) / 32;
    Left left[kTileKeys / 16];
    for (int64_t i = 0; i < 2 * key_steps_; ++i)
      left[i] = left_of(keys + 16 * i, std::clamp<int64_t>(count - 16 * i, 0, 16), copied_ + i * steps_ * kTile);
    pair(values, count);
    for (int64_t i = 0; i < 2 * key_steps_; i += 2)
      for (int64_t b = 0; b < blocks_; b += 2)
        b + 1 < blocks_ ? score<true>(left + i, i, b) : score<false>(left + i, i, b);
    for (int64_t b = 0; b < blocks_; ++b) soften(b, count, logit, hide);
    if (!begin) rescale();
    for (int64_t u = 0; u < units_; ++u)
      for (int64_t b = 0; b < blocks_; b += 2) b + 1 < blocks_ ? add<true>(u, b, begin) : add<false>(u, b, begin);
  }

  // Sums of a lane, 32 columns in order.
  void sums(int64_t lane, int64_t unit, __m512& a, __m512& b) const {
    const float* const at = sums_of(unit, lane);
    const __m512 low = _mm512_load_ps(at), high = _mm512_load_ps(at + 16);
    a = _mm512_permutex2var_ps(low, _mm512_load_si512(kColumnOrder.index), high);
    b = _mm512_permutex2var_ps(low, _mm512_load_si512(kColumnOrder.index + 16), high);
  }

 private:
  static constexpr int64_t kTile = 256, kKeySteps = kTileKeys / 32;

  // Sixteen keys, rows of words.
  struct Left {
    const float* data;
    int64_t stride;
  };

  static __m512i load(const Bf16* p, int64_t count) {
    const __mmask32 some = count >= 32 ? ~__mmask32{0} : (__mmask32{1} << count) - 1;
    return _mm512_maskz_loadu_epi16(some, p);
  }
  float* sums_of(int64_t unit, int64_t lane) const { return sums_ + (unit * lanes() + lane) * 32; }

  // Where they lie, if they are whole and equally far from each other; else copied, and zeros beyond the last.
  Left left_of(const Bf16* const* keys, int64_t count, float* to) const {
    const auto at = [&](int64_t i) { return reinterpret_cast<intptr_t>(keys[i]); };
    bool even = count == 16 && depth_ % 32 == 0 && (at(1) - at(0)) % 4 == 0;
    for (int64_t i = 2; i < 16 && even; ++i) even = at(i) - at(i - 1) == at(1) - at(0);
    if (even) return {reinterpret_cast<const float*>(keys[0]), (at(1) - at(0)) / 4};
    for (int64_t i = 0; i < 16; ++i)
      for (int64_t d = 0; d < depth_; d += 32)
        _mm512_storeu_si512(to + i * steps_ * 16 + d / 2,
                            i < count ? load(keys[i] + d, depth_ - d) : _mm512_setzero_si512());
    return {to, steps_ * 16};
  }

  void pair(const Bf16* const* values, int64_t count) const {
    for (int64_t i = 0; i < 32 * key_steps_; i += 2) {
      float* to = values_ + i / 32 * units_ * 2 * kTile + i % 32 / 2 * 16;
      for (int64_t d = 0; d < columns_; d += 32, to += 2 * kTile) {
        const __m512i none = _mm512_setzero_si512();
        const __m512i a = i < count ? load(values[i] + d, columns_ - d) : none;
        const __m512i b = i + 1 < count ? load(values[i + 1] + d, columns_ - d) : none;
        _mm512_storeu_si512(to, _mm512_unpacklo_epi16(a, b));
        _mm512_storeu_si512(to + kTile, _mm512_unpackhi_epi16(a, b));
      }
    }
  }

  // Thirty-two keys times one block of queries or two.
  template <bool kTwo>
  void score(const Left* left, int64_t i, int64_t b) const {
    const float* query = queries_ + b * steps_ * kTile;
    const int64_t next = steps_ * kTile;
    Tile::template zero<0>(), Tile::template zero<1>(), Tile::template zero<2>(), Tile::template zero<3>();
    for (int64_t s = 0; s < steps_; ++s, query += kTile) {
      Tile::template load<6>(query, 16);
      Tile::template load<4>(left[0].data + 16 * s, left[0].stride);
      Tile::template load<5>(left[1].data + 16 * s, left[1].stride);
      Tile::template multiply_add<0, 4, 6>(), Tile::template multiply_add<2, 5, 6>();
      if constexpr (kTwo) {
        Tile::template load<7>(query + next, 16);
        Tile::template multiply_add<1, 4, 7>(), Tile::template multiply_add<3, 5, 7>();
      }
    }
    float* const to = scores_ + (b * kTileKeys + 16 * i) * 16;
    Tile::template store<0>(to, 16), Tile::template store<2>(to + kTile, 16);
    if constexpr (kTwo) {
      float* const beside = to + kTileKeys * 16;
      Tile::template store<1>(beside, 16), Tile::template store<3>(beside + kTile, 16);
    }
  }

  // Scores become weights relative to the largest so far; the factor brings what was summed before down to it.
  template <class Logit, class Hide>
  void soften(int64_t b, int64_t count, const Logit& logit, const Hide& hide) const {
    float *const scores = scores_ + b * kTileKeys * 16, *const maximum = maximum_ + 16 * b,
                 *const total = total_ + 16 * b;
    const __m512 before = S::load(maximum);
    __m512 top = before;
    for (int64_t k = 0; k < count; ++k) {
      const __m512 x = hide(b, k, logit(S::load(scores + 16 * k)), kHidden);
      S::store(scores + 16 * k, x);
      top = S::max(top, x);
    }
    const auto weight = [&](int64_t k) {
      return k < count ? hide(b, k, exp2<S>(S::sub(S::load(scores + 16 * k), top)), 0.0f) : S::zero();
    };
    __m512 even = S::zero(), odd = S::zero();
    for (int64_t s = 0; s < key_steps_; ++s) {
      __m512i pairs[16];
      for (int64_t i = 0; i < 16; ++i) {
        const __m512 first = weight(32 * s + 2 * i), second = weight(32 * s + 2 * i + 1);
        even = S::add(even, first), odd = S::add(odd, second);
        pairs[i] = pairs_of(first, second);
      }
      transpose16(pairs, weights_ + (b * kKeySteps + s) * kTile, 16);
    }
    const __m512 down = exp2<S>(S::sub(before, top));
    S::store(maximum, top), S::store(factor_ + 16 * b, down);
    S::store(total, S::fma(S::load(total), down, S::add(even, odd)));
  }

  void rescale() const {
    for (int64_t lane = 0; lane < lanes(); ++lane) {
      if (factor_[lane] == 1.0f) continue;
      const __m512 factor = S::set(factor_[lane]);
      for (int64_t u = 0; u < units_; ++u) {
        float* const at = sums_of(u, lane);
        S::store(at, S::mul(S::load(at), factor)), S::store(at + 16, S::mul(S::load(at + 16), factor));
      }
    }
  }

  // 32 columns of one block of queries or two.
  template <bool kTwo>
  void add(int64_t u, int64_t b, bool begin) const {
    float *const to = sums_of(u, 16 * b), *const below = to + 2 * kTile;
    if (begin) {
      Tile::template zero<0>(), Tile::template zero<1>(), Tile::template zero<2>(), Tile::template zero<3>();
    } else {
      Tile::template load<0>(to, 32), Tile::template load<1>(to + 16, 32);
      if constexpr (kTwo) Tile::template load<2>(below, 32), Tile::template load<3>(below + 16, 32);
    }
    const float* weight = weights_ + b * kKeySteps * kTile;
    const float* value = values_ + u * 2 * kTile;
    for (int64_t s = 0; s < key_steps_; ++s, weight += kTile, value += units_ * 2 * kTile) {
      Tile::template load<4>(weight, 16), Tile::template load<6>(value, 16), Tile::template load<7>(value + kTile, 16);
      Tile::template multiply_add<0, 4, 6>(), Tile::template multiply_add<1, 4, 7>();
      if constexpr (kTwo) {
        Tile::template load<5>(weight + kKeySteps * kTile, 16);
        Tile::template multiply_add<2, 5, 6>(), Tile::template multiply_add<3, 5, 7>();
      }
    }
    Tile::template store<0>(to, 32), Tile::template store<1>(to + 16, 32);
    if constexpr (kTwo) Tile::template store<2>(below, 32), Tile::template store<3>(below + 16, 32);
  }

  const int64_t blocks_, depth_, steps_, columns_, units_;
  int64_t key_steps_ = 0;
  float *queries_, *scores_, *weights_, *values_, *sums_, *copied_, *maximum_, *total_, *factor_;
};

}  // namespace
}  // namespace moelight
