// The gated activations over a SIMD type S. Internal linkage: every instruction set has its own copy.
#pragma once

#include "ffn.h"
#include "moelight/exp2.h"

namespace moelight {
namespace {

template <class S>
typename S::V at_most(typename S::V x, float most) {
  return S::sub(S::zero(), S::max(S::set(-most), S::sub(S::zero(), x)));
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

template <class S>
struct Silu {
  static typename S::V apply(typename S::V gate, typename S::V up) {
    return S::mul(S::mul(gate, sigmoid<S>(gate)), up);
  }
};

// x (1 + tanh(u)) / 2 = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
template <class S>
struct GeluTanh {
  static typename S::V apply(typename S::V gate, typename S::V up) {
    const auto cubic = S::fma(S::mul(gate, gate), S::set(0.044715f), S::set(1.0f));
    const auto twice = S::mul(S::mul(gate, S::set(1.5957691216057308f)), cubic);
    return S::mul(S::mul(gate, sigmoid<S>(twice)), up);
  }
};

// gpt-oss: (up + 1) gate sigmoid(1.702 gate), gate at most 7, up within 7 of zero
template <class S>
struct SwigluOai {
  static typename S::V apply(typename S::V gate, typename S::V up) {
    gate = at_most<S>(gate, 7.0f);
    up = at_least<S>(at_most<S>(up, 7.0f), -7.0f);
    const auto swish = S::mul(gate, sigmoid<S>(S::mul(gate, S::set(1.702f))));
    return S::mul(S::add(up, S::set(1.0f)), swish);
  }
};

}  // namespace
}  // namespace moelight
