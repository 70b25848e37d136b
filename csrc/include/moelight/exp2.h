// Powers of two over a SIMD type S. Internal linkage: every instruction set has its own copy.
#pragma once

namespace moelight {
namespace {

constexpr float kLog2E = 1.4426950408889634f;

// (2^x - 1) / x for -0.5 <= x <= 0.5
template <class S>
typename S::V exp2_slope(typename S::V x) {
  auto y = S::set(1.535336188319500e-4f);
  y = S::fma(y, x, S::set(1.339887440266574e-3f));
  y = S::fma(y, x, S::set(9.618437357674640e-3f));
  y = S::fma(y, x, S::set(5.550332471162809e-2f));
  y = S::fma(y, x, S::set(2.402264791363012e-1f));
  return S::fma(y, x, S::set(6.931472028550421e-1f));
}

// 2^x for x <= 126, relative error below 2e-7; 2^-125 below that; not a number stays so. 2^0 is exactly 1.
template <class S>
typename S::V exp2(typename S::V x) {
  x = S::max(S::set(-125.0f), x);
  const auto integer = S::round(x);
  const auto f = S::sub(x, integer);
  return S::scale(S::fma(exp2_slope<S>(f), f, S::set(1.0f)), integer);
}

}  // namespace
}  // namespace moelight
