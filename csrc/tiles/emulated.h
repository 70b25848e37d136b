// What amx.h does, without AMX: so that algorithms over tiles are tested where no tile is. Internal linkage.
#pragma once

#include <xmmintrin.h>

#include <cstdint>
#include <cstring>

#include "moelight/half.h"

namespace moelight {
namespace {

// As AmxTile.
struct EmulatedTile {
  static void configure() { std::memset(words_, 0xff, sizeof words_); }
  static void leave() {}

  template <int kTile>
  static void zero() {
    std::memset(words_[kTile], 0, sizeof words_[kTile]);
  }
  template <int kTile>
  static void load(const float* p, int64_t stride) {
    for (int64_t r = 0; r < 16; ++r) std::memcpy(words_[kTile][r], p + r * stride, sizeof words_[kTile][r]);
  }
  template <int kTile>
  static void store(float* p, int64_t stride) {
    for (int64_t r = 0; r < 16; ++r) std::memcpy(p + r * stride, words_[kTile][r], sizeof words_[kTile][r]);
  }
  template <int kSum, int kLeft, int kRight>
  static void multiply_add() {
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);  // what is subnormal is zero
    for (int r = 0; r < 16; ++r)
      for (int k = 0; k < 16; ++k)
        for (int lane = 0; lane < 16; ++lane) {
          float& sum = words_[kSum][r][lane];
          const uint32_t left = to_bits(words_[kLeft][r][k]), right = to_bits(words_[kRight][k][lane]);
          sum += from_bits(left << 16) * from_bits(right << 16);
          sum += from_bits(left & 0xffff0000) * from_bits(right & 0xffff0000);
        }
    _mm_setcsr(before);
  }

 private:
  inline static thread_local float words_[8][16][16];
};

}  // namespace
}  // namespace moelight
