// The softmax of attention over a SIMD type S (lanes_*.h), in base 2. Internal linkage, as for all that is compiled for
// one instruction set.
//
// "Packed order": S::load2 reads 2 * S::kWidth elements into two vectors in whatever order is cheapest for the stored
// type; S::store2 undoes it, and so does S::straighten (and S::bend brings it back).
#pragma once

#include "gqa/gqa.h"
#include "moelight/exp2.h"

namespace moelight {
namespace {

constexpr float kInfinity = __builtin_inff();
constexpr int kKeys = 4;  // rows per register tile of the scores

template <class S>
constexpr int64_t kUnit = 2 * S::kWidth;

template <class S>
int64_t padded(int64_t count) {
  return (count + kUnit<S> - 1) / kUnit<S> * kUnit<S>;
}

template <class S>
int64_t rounded_to_vectors(int64_t count) {
  return (count + S::kWidth - 1) / S::kWidth * S::kWidth;
}

template <class S>
float exp2_of(float x) {
  float lanes[S::kWidth];
  S::store(lanes, exp2<S>(S::set(x)));
  return lanes[0];
}

// Through e^(2x) - 1, which keeps its relative precision near zero; not a number stays so.
template <class S>
typename S::V tanh(typename S::V x) {
  x = S::mul(x, S::set(2.0f * kLog2E));
  x = S::min(S::set(60.0f), S::max(S::set(-60.0f), x));
  const auto integer = S::round(x);
  const auto f = S::sub(x, integer);
  const auto power = S::scale(S::set(1.0f), integer);
  const auto grown = S::fma(S::mul(exp2_slope<S>(f), f), power, S::sub(power, S::set(1.0f)));
  return S::div(grown, S::add(grown, S::set(2.0f)));
}

// Replaces the maxima of one head by the factors that bring its partials to a common maximum, and returns the sum of
// all weights. The sink is a logit of its own, minus infinity if there is none.
template <class S>
float factors(const Partial* parts, int64_t count, int64_t h, float sink) {
  float maximum = parts[0].maximum[h];
  for (int64_t c = 1; c < count; ++c) maximum = parts[c].maximum[h] > maximum ? parts[c].maximum[h] : maximum;
  if (sink > maximum) maximum = sink;
  float total = 0.0f;
  for (int64_t c = 0; c < count; ++c) {
    const float factor = exp2_of<S>(parts[c].maximum[h] - maximum);
    parts[c].maximum[h] = factor;
    total += factor * parts[c].sum[h];
  }
  return total + exp2_of<S>(sink - maximum);
}

}  // namespace
}  // namespace moelight
