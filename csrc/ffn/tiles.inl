// Products of bf16 activations with weights over a tile type: AMX or its emulation (csrc/tiles). Included by one file
// for each; all of it has internal linkage.
//
// The weight is the left operand as it lies, sixteen rows of sixteen pairs a tile; the activations are the right one,
// packed: a block of sixteen tokens is [pairs of K][16 tokens] words. Sums of two by two tiles stay in their registers
// along a block of K. A token's sum takes the pairs of K in order, whatever stands beside it.
#pragma once

#include "finish.h"
#include "moelight/simd_avx512.h"
#include "moelight/transpose_avx512.h"
#include "pair_rows.h"

namespace moelight {
namespace {

constexpr int64_t kTileRows = 32, kTileTokens = 16;
constexpr int64_t kTileBlock = 1024;                     // elements of K whose rows stay in the second-level cache
constexpr int64_t kTileBufferRow = 2 * kTileBlock + 64;  // bytes of a row converted

// Sums of kTileRows rows, kTokenBlock apart, and rows converted.
struct TileScratch {
  float sums[kTileRows * kTokenBlock];
  char rows[kTileRows * kTileBufferRow];
};

// The left operand: kTileRows rows of a block of K; what is fetched meanwhile.
struct TileRows {
  const char* data;
  int64_t stride;  // bytes, a multiple of 4
  int64_t steps;   // of 32 elements
  const char* ahead;
  int64_t ahead_stride;
};

// sums[row][token] (+)= rows . x for one or two blocks of tokens, x_bytes apart.
template <class Tile, bool kTwo>
void tiles(const TileRows& rows, const char* x, int64_t x_bytes, bool begin, float* sums) {
  const auto* a = reinterpret_cast<const float*>(rows.data);
  const auto* b = reinterpret_cast<const float*>(x);
  const int64_t a_stride = rows.stride / 4, b_next = x_bytes / 4;
  float* const below = sums + 16 * kTokenBlock;
  if (begin) {
    Tile::template zero<0>(), Tile::template zero<1>(), Tile::template zero<2>(), Tile::template zero<3>();
  } else {
    Tile::template load<0>(sums, kTokenBlock), Tile::template load<2>(below, kTokenBlock);
    if constexpr (kTwo) Tile::template load<1>(sums + 16, kTokenBlock), Tile::template load<3>(below + 16, kTokenBlock);
  }
  for (int64_t k = 0; k < rows.steps; ++k, a += 16, b += 256) {
    Tile::template load<6>(b, 16);
    Tile::template load<4>(a, a_stride), Tile::template load<5>(a + 16 * a_stride, a_stride);
    Tile::template multiply_add<0, 4, 6>(), Tile::template multiply_add<2, 5, 6>();
    if constexpr (kTwo) {
      Tile::template load<7>(b + b_next, 16);
      Tile::template multiply_add<1, 4, 7>(), Tile::template multiply_add<3, 5, 7>();
    }
    if (rows.ahead != nullptr)
      for (int64_t r = 0; r < kTileRows; ++r) _mm_prefetch(rows.ahead + r * rows.ahead_stride + 64 * k, _MM_HINT_T1);
  }
  Tile::template store<0>(sums, kTokenBlock), Tile::template store<2>(below, kTokenBlock);
  if constexpr (kTwo) Tile::template store<1>(sums + 16, kTokenBlock), Tile::template store<3>(below + 16, kTokenBlock);
}

// Rows of bf16 that are whole are read in place, else copied; those of kQuantised are unpacked.
template <bool kQuantised>
TileRows left_operand(const Product& p, int64_t row, int64_t first, int64_t size, const char* ahead, int64_t lead,
                      char* buffer) {
  const int64_t row_count = p.rows - row < kTileRows ? p.rows - row : kTileRows;
  const int64_t steps = rounded(size, kPairStep) / 32;
  if constexpr (kQuantised) {
    p.unpacking.unpack(*p.quantized, p.first_row + row, row_count, first, size,
                       ahead == nullptr ? 0 : p.lead_of(row, kTileRows), buffer, kTileBufferRow);
    return {buffer, kTileBufferRow, steps, nullptr, 0};
  }
  if (row_count == kTileRows && size % kPairStep == 0 && p.row_bytes % 4 == 0)
    return {p.weight + row * p.row_bytes + 2 * first, p.row_bytes, steps, ahead, lead};
  for (int64_t r = 0; r < kTileRows; ++r)
    convert_row<Pairs>(p, row + (r < row_count ? r : row_count - 1), first, size, ahead + r * lead,
                       buffer + r * kTileBufferRow);
  return {buffer, kTileBufferRow, steps, nullptr, 0};
}

template <class Tile, bool kQuantised>
void multiply_tiles(const Product& p, void* scratch, float* sums) {
  auto* const buffers = static_cast<TileScratch*>(scratch);
  const int64_t x_block = kTileTokens * p.x_bytes;
  Tile::configure();
  for (int64_t row = 0; row < p.rows; row += kTileRows) {
    for (int64_t first = 0; first < p.depth; first += kTileBlock) {
      const int64_t size = p.depth - first < kTileBlock ? p.depth - first : kTileBlock;
      const bool last = first + size == p.depth, end = last && row + kTileRows >= p.rows;
      const char* const ahead = end || p.weight == nullptr ? p.next
                                                           : p.weight + (last ? row + kTileRows : row) * p.row_bytes +
                                                                 (last ? 0 : 2 * (first + size));
      TileRows rows =
          left_operand<kQuantised>(p, row, first, size, ahead, end ? p.next_bytes : p.row_bytes, buffers->rows);
      const char* x = p.x + first * 2 * kTileTokens;
      int64_t t = 0;
      for (; t + kTileTokens < p.tokens; t += 2 * kTileTokens, x += 2 * x_block) {
        tiles<Tile, true>(rows, x, x_block, first == 0, buffers->sums + t);
        rows.ahead = nullptr;
      }
      if (t < p.tokens) tiles<Tile, false>(rows, x, x_block, first == 0, buffers->sums + t);
    }
    const int64_t row_count = p.rows - row < kTileRows ? p.rows - row : kTileRows;
    for (int64_t t = 0; t < p.tokens; ++t)
      for (int64_t r = 0; r < row_count; ++r) sums[t * kUnitRows + row + r] += buffers->sums[r * kTokenBlock + t];
  }
  Tile::leave();
}

// Sixty-four elements of sixteen tokens at a time.
inline void prepare_tiles(const void* x, int64_t x_bytes, int64_t count, int64_t depth, void* out) {
  constexpr int64_t kPart = 64;
  const int64_t bytes = 2 * rounded(depth, kPairStep);
  for (int64_t t = 0; t < count; t += kTileTokens) {
    for (int64_t k = 0; k < depth; k += kPart) {
      const int64_t size = depth - k < kPart ? depth - k : kPart;
      alignas(64) char parts[kTileTokens][2 * kPart] = {};
      for (int64_t i = 0; i < kTileTokens && t + i < count; ++i) {
        const char* from = static_cast<const char*>(x) + (t + i) * x_bytes;
        arrange(reinterpret_cast<const Bf16*>(from) + k, size, parts[i]);
      }
      auto* to = reinterpret_cast<float*>(static_cast<char*>(out) + t * bytes + k * 2 * kTileTokens);
      for (int64_t half = 0; 32 * half < rounded(size, kPairStep); ++half, to += 256) {
        __m512i words[kTileTokens];
        for (int64_t i = 0; i < kTileTokens; ++i) words[i] = _mm512_load_si512(parts[i] + 64 * half);
        transpose16(words, to, kTileTokens);
      }
    }
  }
}

template <class Tile, bool kQuantised>
Kernel tile_kernel() {
  return {.step = kPairStep,
          .element_bytes = 2,
          .gap_bytes = 0,
          .token_step = kTileTokens,
          .in_place = false,
          .scratch_bytes = sizeof(TileScratch),
          .multiply = multiply_tiles<Tile, kQuantised>,
          .multiply_transposed = nullptr,
          .turn = turn16,
          .prepare = prepare_tiles,
          .store = store<Avx512, Bf16>,
          .activate = activate<Avx512, Bf16>,
          .unpacking = unpacking_pairs};
}

template <class Tile>
Kernel tile_kernel_for(WeightType weight) {
  return weight == WeightType::kQuantized ? tile_kernel<Tile, true>() : tile_kernel<Tile, false>();
}

}  // namespace
}  // namespace moelight
