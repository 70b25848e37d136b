// Latent attention of bf16 over tiles (tiles/attention.h). Internal linkage.
//
// A row is key and value at once, and all heads of a piece are queries of one block of rows after the other.
#pragma once

#include "gqa/lanes_avx512.h"
#include "kernel.inl"
#include "tiles/attention.h"

namespace moelight {
namespace {

template <class Tile>
void attend_in_tiles(const MlaArgs& args, const MlaPiece& piece, float* scratch, const Partial& part) {
  using S = LanesAvx512;
  const int64_t heads = piece.last_head - piece.first_head, width = args.latent + args.rotary;
  TileAttention<Tile> attention(heads, width, args.latent, scratch);
  const auto* latent = static_cast<const Bf16*>(args.q_latent) + piece.sequence * args.q_latent_stride;
  const auto* rotary = static_cast<const Bf16*>(args.q_rotary) + piece.sequence * args.q_rotary_stride;
  for (int64_t first = 0; first < heads; first += 16) {
    const Bf16* queries[16] = {};
    for (int64_t i = 0; i < 16 && first + i < heads; ++i) {
      const int64_t h = piece.first_head + first + i;
      Bf16* const joined = attention.spare() + i * width;
      std::copy_n(latent + h * args.latent, args.latent, joined);
      std::copy_n(rotary + h * args.rotary, args.rotary, joined + args.latent);
      queries[i] = joined;
    }
    attention.pack_queries(first / 16, queries);
  }
  std::fill_n(attention.maximum(), attention.lanes(), -kInfinity);
  std::fill_n(attention.total(), attention.lanes(), 0.0f);
  Tile::configure();
  const int32_t* const table = args.tables + piece.sequence * args.table_stride;
  const auto factor = S::set(args.scale * kLog2E);
  for (int64_t at = piece.begin; at < piece.end; at += kTileKeys) {
    const int64_t count = std::min(kTileKeys, piece.end - at);
    const Bf16* rows[kTileKeys];
    for (int64_t i = 0; i < count; ++i) {
      const int64_t block = table[(at + i) / args.block_size], offset = (at + i) % args.block_size;
      rows[i] = static_cast<const Bf16*>(args.cache) + block * args.cache_stride + offset * width;
    }
    attention.pass(
        rows, rows, count, at == piece.begin, [&](__m512 product) { return S::mul(product, factor); },
        [](int64_t, int64_t, __m512 x, float) { return x; });
  }
  Tile::leave();
  std::copy_n(attention.maximum(), heads, part.maximum), std::copy_n(attention.total(), heads, part.sum);
  float* to = part.values;
  for (int64_t unit = 0; unit * kUnit<S> < args.latent; ++unit)
    for (int64_t h = 0; h < heads; ++h, to += kUnit<S>) {
      __m512 a, b;
      attention.sums(h, unit, a, b);
      S::bend<Bf16>(a, b);
      store_unit<S>(to, a, b);
    }
}

template <class Tile>
const MlaKernels& tile_kernels() {
  static const MlaKernels table = [] {
    MlaKernels kernels = moelight::kernels<LanesAvx512>();
    kernels.attend[static_cast<int>(DType::kBFloat16)] = attend_in_tiles<Tile>;
    kernels.scratch_floats = [](int64_t heads, int64_t latent, int64_t rotary) {
      return std::max(scratch_floats<LanesAvx512>(heads, latent, rotary),
                      TileAttention<Tile>::scratch_floats(heads, latent + rotary, latent));
    };
    return kernels;
  }();
  return table;
}

}  // namespace
}  // namespace moelight
