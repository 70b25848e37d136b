// What attention asks of one lane beyond simd_scalar.h.
#pragma once

#include "moelight/simd_scalar.h"

namespace moelight {
namespace {

struct LanesScalar : Scalar {
  static constexpr int kScoredHeads = kHeadTile, kScoredRows = 1, kWeighedHeads = 2;
  static constexpr int kWeighedUnits = 2;  // of a row in a register tile of the values

  static V min(V x, V y) { return x < y ? x : y; }
  static V div(V x, V y) { return x / y; }
  template <class T>
  static void straighten(V&, V&) {}
  template <class T>
  static void bend(V&, V&) {}
};

}  // namespace
}  // namespace moelight
