// The activations over a SIMD type S. Internal linkage: every instruction set has its own copy.
#pragma once

#include "ffn.h"
#include "moelight/exp2.h"

namespace moelight {
namespace {

template <class S>
typename S::V at_most(typename S::V x, float bound) {
  return S::sub(S::zero(), S::max(S::set(-bound), S::sub(S::zero(), x)));
}

template <class S>
typename S::V at_least(typename S::V x, float least) {
  return S::max(S::set(least), x);
}

// 1 / (1 + e^-x), relative error below 1e-6; not a number stays so.
template <class S>
typename S::V sigmoid(typename S::V x) {
  const auto y = exp2<S>(at_most<S>(S::mul(x, S::set(-kLog2E)), 126.0f));
  return S::set(1.0f) / S::add(S::set(1.0f), y);
}

// Curves of the gate, or of what has none; `alpha` is silu's alone.
template <class S>
struct Silu {
  static typename S::V apply(typename S::V x, float alpha) { return S::mul(x, sigmoid<S>(S::mul(x, S::set(alpha)))); }
};

// x (1 + tanh(u)) / 2 = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
template <class S>
struct GeluTanh {
  static typename S::V apply(typename S::V x, float) {
    const auto cubic = S::fma(S::mul(x, x), S::set(0.044715f), S::set(1.0f));
    const auto twice = S::mul(S::mul(x, S::set(1.5957691216057308f)), cubic);
    return S::mul(x, sigmoid<S>(twice));
  }
};

// x (1 + erf(x / sqrt(2))) / 2 by Abramowitz and Stegun 7.1.26, erf within 1.5e-7: with z = |x| / sqrt(2), half of
// erfc(z) is the share below zero and one less the share above.
template <class S>
struct Gelu {
  static typename S::V apply(typename S::V x, float) {
    const auto magnitude = at_most<S>(S::max(x, S::sub(S::zero(), x)), 1e30f);
    const auto z = S::mul(magnitude, S::set(0.7071067811865476f));
    const auto t = S::set(1.0f) / S::fma(z, S::set(0.3275911f), S::set(1.0f));
    auto y = S::fma(t, S::set(1.061405429f), S::set(-1.453152027f));
    y = S::fma(y, t, S::set(1.421413741f));
    y = S::fma(y, t, S::set(-0.284496736f));
    y = S::mul(S::fma(y, t, S::set(0.254829592f)), t);
    const auto below = S::mul(S::mul(y, exp2<S>(S::mul(S::mul(z, z), S::set(-kLog2E)))), S::set(0.5f));
    // max(x, 0) (1 - below) + min(x, 0) below = max(x, 0) - |x| below
    return S::sub(S::max(S::zero(), x), S::mul(magnitude, below));
  }
};

template <class S>
struct SquaredRelu {
  static typename S::V apply(typename S::V x, float) {
    const auto positive = S::max(S::zero(), x);
    return S::mul(positive, positive);
  }
};

// kPlain: without limits and shift, and alpha is 1; a zero is positive, as it is behind limits.
template <class S, class C, bool kPlain>
typename S::V curve(const Activation& by, typename S::V x) {
  if constexpr (kPlain) return C::apply(S::add(x, S::zero()), 1.0f);
  if (!by.late) x = at_most<S>(x, by.limit);
  const auto y = C::apply(x, by.alpha);
  return by.late ? at_most<S>(y, by.limit) : y;
}

template <class S, class C, bool kPlain>
typename S::V gated(const Activation& by, typename S::V gate, typename S::V up) {
  if constexpr (kPlain) return S::mul(S::add(up, S::zero()), curve<S, C, true>(by, gate));
  up = at_least<S>(at_most<S>(up, by.limit), -by.limit);
  return S::mul(S::add(up, S::set(by.shift)), curve<S, C, false>(by, gate));
}

}  // namespace
}  // namespace moelight
