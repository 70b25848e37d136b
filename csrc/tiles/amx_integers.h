// AMX's tiles of int8. Include only from a file compiled with -mamx-tile -mamx-int8; internal linkage.
#pragma once

#include "tiles/amx.h"
#include "tiles/integers.h"

namespace moelight {
namespace {

struct AmxIntegerTiles : AmxTile {
  static constexpr bool kAvailable = true;

  static void configure() {
    AmxTile::configure({.row_bytes = {64, 64, tile_columns(2), 64, tile_columns(4), 64, tile_columns(6), 64},
                        .rows = {16, 16, 16, tile_columns(3) / 4, 16, tile_columns(5) / 4, 16, tile_columns(7) / 4}});
  }

  template <int kTile>
  static void load(const void* p, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  static void store(int32_t* to) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(kCodesBytes), "i"(kTile) : "memory");
  }
  template <int kSum, int kTokens, int kCodes>
  static void multiply_add() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kTokens), "i"(kCodes));
  }
};

}  // namespace
}  // namespace moelight
