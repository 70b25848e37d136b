// What prefill needs of one lane beyond simd_scalar.h.
#pragma once

#include "moelight/simd_scalar.h"

namespace moelight {
namespace {

struct PrefillScalar : Scalar {
  static constexpr int kTileRows = 2, kTileVectors = 4;

  static V div(V x, V y) { return x / y; }

  // x in the lanes [begin, end), `other` beside them.
  static V keep(V x, int64_t begin, int64_t end, float other) { return begin <= 0 && end > 0 ? x : other; }

  static void transpose(const float* from, int64_t, float* to, int64_t) { *to = *from; }
};

}  // namespace
}  // namespace moelight
