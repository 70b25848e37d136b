// What attention asks of eight lanes beyond simd_neon.h.
#pragma once

#include <type_traits>

#include "moelight/simd_neon.h"

namespace moelight {
namespace {

struct LanesNeon : Neon {
  static constexpr int kScoredHeads = 4, kScoredRows = 2, kWeighedHeads = 4;
  static constexpr int kWeighedUnits = 1;  // of a row in a register tile of the values

  // From the order in which load2 reads a T to that of memory, and back.
  template <class T>
  static void straighten(V& a, V& b) {
    if constexpr (std::is_same_v<T, Bf16>) zip(a, b, a, b);
  }
  template <class T>
  static void bend(V& a, V& b) {
    if constexpr (std::is_same_v<T, Bf16>) unzip(a, b, a, b);
  }
};

}  // namespace
}  // namespace moelight
