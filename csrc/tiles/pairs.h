// Numbers of two vectors as the words of a right operand. Include only from a file compiled for AVX-512 with BF16;
// internal linkage.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace moelight {
namespace {

struct PairOrder {
  uint16_t index[32] = {};
  constexpr PairOrder() {
    for (int i = 0; i < 32; ++i) index[i] = static_cast<uint16_t>(i / 2 + i % 2 * 16);
  }
};

// Rounded, what is subnormal to zero, one of each vector in a word.
inline __m512i pairs_of(__m512 first, __m512 second) {
  alignas(64) static constexpr PairOrder kOrder;
  return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder.index), (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

}  // namespace
}  // namespace moelight
