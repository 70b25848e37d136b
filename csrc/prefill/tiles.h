// Products of bf16 pairs, sixteen rows by sixteen lanes at a time, over a tile type: AMX's (amx.cpp) or its emulated
// (emulated_amx.cpp). Layouts are those of dots.h: a packed block is what the right operand of a tile product wants.
#pragma once

#include <cstring>

#include "dots.h"
#include "product.h"

namespace moelight {
namespace {

template <class Tile>
struct Tiles : Dots {
  static constexpr int64_t kRowTile = 32, kStepTile = 16;

  static void configure() { Tile::configure(); }
  static void leave() { Tile::leave(); }

  // The whole of a step is multiplied: pairs of keys behind the last are zero.
  static void pack_values(const Bf16* const* rows, int64_t count, int64_t head_dim, float* words) {
    Dots::pack_values(rows, count, head_dim, words);
    const int64_t pairs = (count + 1) / 2, padded_pairs = (pairs + kStepTile - 1) / kStepTile * kStepTile;
    const int64_t stride = lanes(head_dim);
    std::memset(words + pairs * stride, 0, static_cast<size_t>((padded_pairs - pairs) * stride) * sizeof(float));
  }

  static void multiply(const PromptProduct& p) {
    for (int64_t lane = 0; lane < p.lanes; lane += 32)
      for (int64_t row = 0; row < p.rows; row += kRowTile) product_tiles(p, row, lane);
  }

 private:
  static void product_tiles(const PromptProduct& p, int64_t row, int64_t lane) {
    float* const c = p.c + row * p.c_stride + lane;
    const int64_t below = 16 * p.c_stride;
    if (p.factor) {
      rescale(p, row, c);
      Tile::template load<0>(c, p.c_stride), Tile::template load<1>(c + 16, p.c_stride);
      Tile::template load<2>(c + below, p.c_stride), Tile::template load<3>(c + below + 16, p.c_stride);
    } else {
      Tile::template zero<0>(), Tile::template zero<1>(), Tile::template zero<2>(), Tile::template zero<3>();
    }
    const float* a = p.a + row * p.a_stride;
    const float* b = p.b + lane;
    for (int64_t k = 0; k < p.steps; k += kStepTile, a += kStepTile, b += kStepTile * p.b_stride) {
      Tile::template load<4>(a, p.a_stride), Tile::template load<5>(a + 16 * p.a_stride, p.a_stride);
      Tile::template load<6>(b, p.b_stride), Tile::template load<7>(b + 16, p.b_stride);
      Tile::template multiply_add<0, 4, 6>(), Tile::template multiply_add<1, 4, 7>();
      Tile::template multiply_add<2, 5, 6>(), Tile::template multiply_add<3, 5, 7>();
    }
    Tile::template store<0>(c, p.c_stride), Tile::template store<1>(c + 16, p.c_stride);
    Tile::template store<2>(c + below, p.c_stride), Tile::template store<3>(c + below + 16, p.c_stride);
  }

  static void rescale(const PromptProduct& p, int64_t row, float* c) {
    for (int64_t r = row; r < row + kRowTile; ++r, c += p.c_stride) {
      const V factor = Lanes::set(p.factor[r]);
      Lanes::store(c, Lanes::mul(Lanes::load(c), factor));
      Lanes::store(c + 16, Lanes::mul(Lanes::load(c + 16), factor));
    }
  }
};

}  // namespace
}  // namespace moelight
