// AMX's tiles of bf16 pairs. Include only from a file compiled with -mamx-tile -mamx-bf16; internal linkage.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace moelight {
namespace {

// The shapes of tiles; by themselves all are whole.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// A tile is sixteen rows of sixteen words; strides are in words. In assembly, because gcc 12 takes the number of a tile
// as a literal only.
struct AmxTile {
  static void configure(const TileShapes& shapes = {}) {
    asm volatile("" ::"r"(&shapes) : "memory");  // gcc 12 takes the intrinsic to read the first eight bytes only
    _tile_loadconfig(&shapes);
  }
  static void leave() { _tile_release(); }

  template <int kTile>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
  }
  template <int kTile>
  static void load(const float* p, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride * 4), "i"(kTile) : "memory");
  }
  template <int kTile>
  static void store(float* p, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride * 4), "i"(kTile) : "memory");
  }
  template <int kSum, int kLeft, int kRight>
  static void multiply_add() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight));
  }
};

}  // namespace
}  // namespace moelight
