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
  if constexpr (std::is_same_v<X, Fp16>) {
    for (; i + 2 * S::kWidth <= count; i += 2 * S::kWidth)
      S::store2(to + i, S::load(from + i), S::load(from + i + S::kWidth));
  } else if constexpr (requires { S::store_in_order(to, S::zero()); }) {
    for (; i + S::kWidth <= count; i += S::kWidth) S::store_in_order(to + i, S::load(from + i));
  }
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

template <class S, class X, class C, bool kPlain>
void activate_as(const Activation& by, Pairing pairing, const float* sums, const float* ups, const float* bias,
                 const float* up_bias, int64_t columns, int64_t tokens, void* out, int64_t stride) {
  alignas(64) float line[kUnitRows];
  const auto biased = [&](int64_t i) { return S::add(S::load(sums + i), S::load(bias + i)); };
  for (int64_t t = 0; t < tokens; ++t, sums += kUnitRows, ups += kUnitRows) {
    for (int64_t i = 0; i < columns; i += S::kWidth) {
      typename S::V gate, up;
      if (pairing == Pairing::kUngated) {
        S::store(line + i, curve<S, C, kPlain>(by, biased(i)));
        continue;
      }
      if (pairing == Pairing::kInterleaved) {
        S::unzip(biased(2 * i), biased(2 * i + S::kWidth), gate, up);
      } else {
        gate = biased(i), up = S::add(S::load(ups + i), S::load(up_bias + i));
      }
      S::store(line + i, gated<S, C, kPlain>(by, gate, up));
    }
    narrow<S>(line, columns, static_cast<X*>(out) + t * stride);
  }
}

// f(curve, whether the activation is plain), both as types.
template <class S, class F>
void with_curve(const Activation& by, F&& f) {
  const auto as = [&](auto curve) { by.plain() ? f(curve, std::true_type{}) : f(curve, std::false_type{}); };
  switch (by.curve) {
    case Curve::kSilu:
      return as(Silu<S>{});
    case Curve::kGelu:
      return as(Gelu<S>{});
    case Curve::kGeluTanh:
      return as(GeluTanh<S>{});
    case Curve::kSquaredRelu:
      return as(SquaredRelu<S>{});
  }
}

template <class S, class X>
void activate(const Activation& by, Pairing pairing, const float* sums, const float* ups, const float* bias,
              const float* up_bias, int64_t columns, int64_t tokens, void* out, int64_t stride) {
  with_curve<S>(by, [&]<class C, class Plain>(C, Plain) {
    activate_as<S, X, C, Plain::value>(by, pairing, sums, ups, bias, up_bias, columns, tokens, out, stride);
  });
}

}  // namespace
}  // namespace moelight
