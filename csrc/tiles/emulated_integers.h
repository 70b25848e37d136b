// What amx_integers.h does, without AMX: so that algorithms over tiles are tested where no tile is. Internal linkage.
#pragma once

#include <cstring>

#include "tiles/integers.h"

namespace moelight {
namespace {

// As AmxIntegerTiles.
struct EmulatedIntegerTiles {
  static constexpr bool kAvailable = true;
  static void configure() { std::memset(bytes_, 0xff, sizeof bytes_); }
  static void leave() {}

  template <int kTile>
  static void zero() {
    std::memset(bytes_[kTile], 0, sizeof bytes_[kTile]);
  }
  template <int kTile>
  static void load(const void* p, int64_t stride) {
    constexpr bool kTokens = kTile % 2 == 0;
    constexpr int64_t kRows = kTokens ? 16 : tile_columns(kTile) / 4, kBytes = kTokens ? tile_columns(kTile) : 64;
    for (int64_t r = 0; r < kRows; ++r)
      std::memcpy(bytes_[kTile][r], static_cast<const char*>(p) + r * stride, static_cast<size_t>(kBytes));
  }
  template <int kTile>
  static void store(int32_t* to) {
    for (int64_t r = 0; r < 16; ++r) std::memcpy(to + r * kCodesBytes / 4, bytes_[kTile][r], 64);
  }
  template <int kSum, int kTokens, int kCodes>
  static void multiply_add() {
    for (int r = 0; r < 16; ++r)
      for (int lane = 0; lane < 16; ++lane) {
        int32_t sum;
        std::memcpy(&sum, bytes_[kSum][r] + 4 * lane, 4);
        for (int64_t k = 0; k < tile_columns(kTokens); ++k)
          sum += static_cast<int8_t>(bytes_[kTokens][r][k]) * bytes_[kCodes][k / 4][4 * lane + k % 4];
        std::memcpy(bytes_[kSum][r] + 4 * lane, &sum, 4);
      }
  }

 private:
  inline static thread_local uint8_t bytes_[8][16][64];
};

}  // namespace
}  // namespace moelight
