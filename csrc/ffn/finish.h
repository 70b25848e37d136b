// What becomes of sums, over a SIMD type S: the bias, the activation, the rounding. Internal linkage: every instruction
// set has its own copy.
#pragma once

#include <type_traits>

#include "activation.h"
#include "ffn.h"

namespace moelight {
namespace {

template <class S, class X>
void narrow(const float* from, int64_t count, X* to) {
  int64_t i = 0;
  if constexpr (std::is_same_v<X, Fp16>)
    for (; i + 2 * S::kWidth <= count; i += 2 * S::kWidth)
      S::store2(to + i, S::load(from + i), S::load(from + i + S::kWidth));
  for (; i < count; ++i) from_float(from[i], to[i]);
}

template <class S, class X>
void store(const float* sums, const float* bias, int64_t rows, int64_t tokens, void* out, int64_t stride) {
  float line[kUnitRows];
  for (int64_t t = 0; t < tokens; ++t, sums += kUnitRows) {
    for (int64_t i = 0; i < rows; i += S::kWidth) S::store(line + i, S::add(S::load(sums + i), S::load(bias + i)));
    narrow<S>(line, rows, static_cast<X*>(out) + t * stride);
  }
}

template <class S, class X, class A>
void activate_as(const float* sums, const float* bias, int64_t columns, int64_t tokens, void* out, int64_t stride) {
  alignas(64) float line[kUpColumn];
  for (int64_t t = 0; t < tokens; ++t, sums += kUnitRows) {
    for (int64_t i = 0; i < columns; i += S::kWidth) {
      const auto gate = S::add(S::load(sums + i), S::load(bias + i));
      const auto up = S::add(S::load(sums + kUpColumn + i), S::load(bias + kUpColumn + i));
      S::store(line + i, A::apply(gate, up));
    }
    narrow<S>(line, columns, static_cast<X*>(out) + t * stride);
  }
}

template <class S, class X>
void activate(Activation activation, const float* sums, const float* bias, int64_t columns, int64_t tokens, void* out,
              int64_t stride) {
  switch (activation) {
    case Activation::kSilu:
      return activate_as<S, X, Silu<S>>(sums, bias, columns, tokens, out, stride);
    case Activation::kGeluTanh:
      return activate_as<S, X, GeluTanh<S>>(sums, bias, columns, tokens, out, stride);
    case Activation::kSwigluOai:
      return activate_as<S, X, SwigluOai<S>>(sums, bias, columns, tokens, out, stride);
  }
}

}  // namespace
}  // namespace moelight
