// Symmetric int8, a scale for each row. Internal linkage. Plain loops that a compiler makes vectors of; no sum in them,
// so every instruction set gives the same codes.
#pragma once

#include <cstdint>

#include "moelight/half.h"

namespace moelight {
namespace {

// Nearest even for |x| below 2^22, without a call.
inline float rounded(float x) {
  constexpr float kShift = 12582912.0f;
  return (x + kShift) - kShift;
}

template <class T>
void quantise(const void* row, int64_t count, int8_t* codes, float* scale) {
  constexpr int32_t kInfinityBits = 0x7f800000;
  const T* from = static_cast<const T*>(row);
  // Magnitudes compare as their bits do, those that are not numbers above all others.
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto magnitude = static_cast<int32_t>(to_bits(to_float(from[i])) & 0x7fffffff);
    largest = magnitude > largest ? magnitude : largest;
  }
  const float step = from_bits(static_cast<uint32_t>(largest)) / 127.0f;
  *scale = largest < kInfinityBits ? step : __builtin_nanf("");
  if (largest >= kInfinityBits || !(step > 0.0f)) {
    for (int64_t i = 0; i < count; ++i) codes[i] = 0;
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    // Beside a subnormal step the quotient may be too large.
    float code = rounded(to_float(from[i]) / step);
    code = code > 127.0f ? 127.0f : code;
    code = code < -127.0f ? -127.0f : code;
    codes[i] = static_cast<int8_t>(code);
  }
}

}  // namespace
}  // namespace moelight
