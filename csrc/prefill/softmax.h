// The online softmax of one query row over one block of keys, over a SIMD type S; logits are in base 2.
#pragma once

#include <cstdint>
#include <limits>

#include "moelight/exp2.h"

namespace moelight {
namespace {

constexpr float kLowest = std::numeric_limits<float>::lowest();

// From products to base-2 logits.
template <class S>
class Logits {
 public:
  using V = typename S::V;

  Logits(float scale, float softcap)
      : capped_(softcap > 0),
        inner_(capped_ ? 2 * scale / softcap * kLog2E : scale * kLog2E),
        outer_(softcap * kLog2E) {}

  V operator()(V product) const {
    const V x = S::mul(product, S::set(inner_));
    if (!capped_) return x;
    // tanh(y) = (e^2y - 1) / (e^2y + 1), which is 1 to the last bit before 2^40.
    const V low = S::max(S::set(-40.0f), x);
    const V u = exp2<S>(S::sub(S::zero(), S::max(S::set(-40.0f), S::sub(S::zero(), low))));
    const V tanh = S::div(S::sub(u, S::set(1.0f)), S::add(u, S::set(1.0f)));
    return S::mul(tanh, S::set(outer_));
  }

 private:
  bool capped_;
  float inner_, outer_;
};

// Keys [begin, end) of a block.
struct KeyRange {
  int64_t begin, end;
};

// What one query row carries from block to block.
struct RowState {
  float* maximum;  // of the logits so far
  float* sum;      // [S::kWidth] of the weights so far, relative to the maximum
  float* factor;   // that brings what was summed before to the new maximum
};

// Turns `count` products (a multiple of M::kUnit) into weights, in place, packed as M wants them. Keys that the row
// does not see weigh exactly nothing.
template <class M>
void soften(const Logits<typename M::Lanes>& logits, float* row, KeyRange seen, int64_t count, const RowState& state) {
  using S = typename M::Lanes;
  if (seen.begin >= seen.end) {
    for (int64_t i = 0; i < count / M::kKeysPerWord; ++i) row[i] = 0.0f;
    *state.factor = 1.0f;
    return;
  }
  const bool edge = seen.begin > 0 || seen.end < count;
  const auto hide = [&](typename S::V x, int64_t i, float value) {
    return edge ? S::keep(x, seen.begin - i, seen.end - i, value) : x;
  };
  auto top = S::set(kLowest);
  for (int64_t i = 0; i < count; i += S::kWidth) {
    const auto logit = hide(logits(S::load(row + i)), i, kLowest);
    S::store(row + i, logit);
    top = S::max(top, logit);
  }
  const float highest = S::reduce_max(top), before = *state.maximum;
  const float maximum = highest > before ? highest : before;
  const auto weight = [&](int64_t i) { return hide(exp2<S>(S::sub(S::load(row + i), S::set(maximum))), i, 0.0f); };
  float factor[S::kWidth];
  S::store(factor, exp2<S>(S::set(before - maximum)));
  auto sum = S::mul(S::load(state.sum), S::set(factor[0]));
  for (int64_t i = 0; i < count; i += M::kUnit) {
    const auto a = weight(i), b = weight(i + S::kWidth);
    sum = S::add(S::add(sum, a), b);
    M::pack_weights(a, b, row, i);
  }
  S::store(state.sum, sum);
  *state.maximum = maximum;
  *state.factor = factor[0];
}

}  // namespace
}  // namespace moelight
