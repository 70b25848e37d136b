// Products of bf16 activations with weights over a tile type: AMX or its emulation (csrc/tiles). Included by one file
// for each; all of it has internal linkage.
//
// The weight is the left operand as it lies, sixteen rows of sixteen pairs a tile; the activations are the right one,
// packed: a block of sixteen tokens is [pairs of K][16 tokens] words. A token's sum takes the pairs of K in order,
// whatever stands beside it. Sums of two by two tiles stay in their registers along a block of K, those of unpacked
// rows with few tokens along all of it. They lie as rows of tokens (Kernel::by_rows) and are activated so: two rows
// rounded to pairs are words of the next right operand, and only what leaves for rows of numbers is transposed.
#pragma once

#include <utility>

#include "finish.h"
#include "moelight/simd_avx512.h"
#include "moelight/transpose_avx512.h"
#include "pair_rows.h"
#include "tiles/pairs.h"

namespace moelight {
namespace {

constexpr int64_t kTileRows = 32, kTileTokens = 16;
constexpr int64_t kTileBlock = 1024;                     // elements of K whose rows stay in the second-level cache
constexpr int64_t kTileBufferRow = 2 * kTileBlock + 64;  // bytes of a row converted
constexpr int64_t kTileScratch = kTileRows * kTileBufferRow;
// Up to so many tokens the processor's own fetching of rows in place is faster than lines that are asked for.
constexpr int64_t kUnaskedTokens = 64;
// Columns that are unpacked at once for few tokens: two buffers of them stay in the first-level cache.
constexpr int64_t kNearColumns = 128, kNearTokens = 2 * kTileTokens;

// The left operand: kTileRows rows of a block of K; what is fetched meanwhile.
struct TileRows {
  const char* data;
  int64_t stride;  // bytes, a multiple of 4
  int64_t steps;   // of 32 elements
  const char* ahead;
  int64_t ahead_stride;
};

// Sums of kTileRows rows with one block of tokens or two, rows kTokenBlock apart.
template <class Tile, bool kTwo>
void load_sums(const float* sums, bool begin) {
  if (begin) {
    Tile::template zero<0>(), Tile::template zero<1>(), Tile::template zero<2>(), Tile::template zero<3>();
    return;
  }
  const float* const below = sums + 16 * kTokenBlock;
  Tile::template load<0>(sums, kTokenBlock), Tile::template load<2>(below, kTokenBlock);
  if constexpr (kTwo) Tile::template load<1>(sums + 16, kTokenBlock), Tile::template load<3>(below + 16, kTokenBlock);
}

template <class Tile, bool kTwo>
void store_sums(float* sums) {
  float* const below = sums + 16 * kTokenBlock;
  Tile::template store<0>(sums, kTokenBlock), Tile::template store<2>(below, kTokenBlock);
  if constexpr (kTwo) Tile::template store<1>(sums + 16, kTokenBlock), Tile::template store<3>(below + 16, kTokenBlock);
}

// Sums += 32 columns of rows, a_bytes apart, times those of tokens, whose second block is x_block bytes behind.
template <class Tile, bool kTwo>
inline __attribute__((always_inline)) void add_step(const char* rows, int64_t a_bytes, const char* x, int64_t x_block) {
  const auto* a = reinterpret_cast<const float*>(rows);
  const auto* b = reinterpret_cast<const float*>(x);
  const int64_t a_stride = a_bytes / 4;
  Tile::template load<6>(b, 16);
  Tile::template load<4>(a, a_stride), Tile::template load<5>(a + 16 * a_stride, a_stride);
  Tile::template multiply_add<0, 4, 6>(), Tile::template multiply_add<2, 5, 6>();
  if constexpr (kTwo) {
    Tile::template load<7>(b + x_block / 4, 16);
    Tile::template multiply_add<1, 4, 7>(), Tile::template multiply_add<3, 5, 7>();
  }
}

template <class Tile, bool kTwo>
void add_block(const TileRows& rows, const char* x, int64_t x_block, bool begin, float* sums) {
  load_sums<Tile, kTwo>(sums, begin);
  for (int64_t k = 0; k < rows.steps; ++k) {
    add_step<Tile, kTwo>(rows.data + 64 * k, rows.stride, x + kTileTokens * 64 * k, x_block);
    if (rows.ahead != nullptr)
      for (int64_t r = 0; r < kTileRows; ++r) _mm_prefetch(rows.ahead + r * rows.ahead_stride + 64 * k, _MM_HINT_T1);
  }
  store_sums<Tile, kTwo>(sums);
}

// Rows of bf16 that are whole are read in place, else copied; those of kQuantised are unpacked.
template <bool kQuantised>
TileRows left_operand(const Product& p, int64_t row, int64_t first, int64_t size, const char* ahead, int64_t lead,
                      char* buffer) {
  const int64_t row_count = p.rows - row < kTileRows ? p.rows - row : kTileRows;
  const int64_t steps = rounded(size, kPairStep) / 32;
  if constexpr (kQuantised) {
    p.unpacking.unpack(*p.quantized, p.first_row + row, row_count, first, size, p.lead_of(row, kTileRows), buffer,
                       kTileBufferRow);
    return {buffer, kTileBufferRow, steps, nullptr, 0};
  }
  if (row_count == kTileRows && size % kPairStep == 0 && p.row_bytes % 4 == 0)
    return {p.weight + row * p.row_bytes + 2 * first, p.row_bytes, steps, p.tokens > kUnaskedTokens ? ahead : nullptr,
            lead};
  for (int64_t r = 0; r < kTileRows; ++r)
    convert_row<Pairs>(p, row + (r < row_count ? r : row_count - 1), first, size, ahead + r * lead,
                       buffer + r * kTileBufferRow);
  return {buffer, kTileBufferRow, steps, nullptr, 0};
}

// A tile of rows and a block of K, all tokens, then the next block.
template <class Tile, bool kQuantised>
void multiply_blocks(const Product& p, char* buffer, float* sums) {
  const int64_t x_block = kTileTokens * p.x_bytes;
  for (int64_t row = 0; row < p.rows; row += kTileRows, sums += kTileRows * kTokenBlock) {
    for (int64_t first = 0; first < p.depth; first += kTileBlock) {
      const int64_t size = p.depth - first < kTileBlock ? p.depth - first : kTileBlock;
      const bool last = first + size == p.depth, end = last && row + kTileRows >= p.rows;
      const char* const ahead = end || p.weight == nullptr ? p.next
                                                           : p.weight + (last ? row + kTileRows : row) * p.row_bytes +
                                                                 (last ? 0 : 2 * (first + size));
      TileRows rows = left_operand<kQuantised>(p, row, first, size, ahead, end ? p.next_bytes : p.row_bytes, buffer);
      const bool begin = first == 0 && !p.continued;
      const char* x = p.x + first * 2 * kTileTokens;
      int64_t t = 0;
      for (; t + kTileTokens < p.tokens; t += 2 * kTileTokens, x += 2 * x_block) {
        add_block<Tile, true>(rows, x, x_block, begin, sums + t);
        rows.ahead = nullptr;
      }
      if (t < p.tokens) add_block<Tile, false>(rows, x, x_block, begin, sums + t);
    }
  }
}

// Some columns of kTileRows rows.
struct NearBlock {
  int64_t row, first;
};

// Of a quantised matrix with few tokens: while the tiles multiply one block, the next is unpacked, some rows each step.
template <class Tile, bool kTwo>
void multiply_near(const Product& p, char* buffer, float* sums) {
  const int64_t columns = std::max(kNearColumns, p.quantized->format->block), bytes = 2 * columns;
  const auto size_of = [&](const NearBlock& at) { return std::min(columns, p.depth - at.first); };
  const auto unpack = [&](const NearBlock& at, int64_t from, int64_t to, char* out) {
    const int64_t end = std::min(to, p.rows - at.row);
    if (at.first == 0 && from == 0) p.fetch_scales(at.row, kTileRows, kTileRows);
    if (from < end)
      p.unpacking.unpack(*p.quantized, p.first_row + at.row + from, end - from, at.first, size_of(at),
                         p.lead_of(at.row + from, kTileRows), out + from * bytes, bytes);
  };
  char *near = buffer, *after = buffer + kTileRows * bytes;
  NearBlock at = {0, 0}, next;
  unpack(at, 0, kTileRows, near);
  for (; at.row < p.rows; at = next, std::swap(near, after)) {
    next = at.first + columns < p.depth ? NearBlock{at.row, at.first + columns} : NearBlock{at.row + kTileRows, 0};
    if (at.first == 0) load_sums<Tile, kTwo>(sums, true);
    const int64_t steps = rounded(size_of(at), kPairStep) / kPairStep;
    const char* x = p.x + at.first * 2 * kTileTokens;
    for (int64_t k = 0; k < steps; ++k, x += kTileTokens * 64) {
      if (next.row < p.rows) unpack(next, kTileRows * k / steps, kTileRows * (k + 1) / steps, after);
      add_step<Tile, kTwo>(near + 64 * k, bytes, x, kTileTokens * p.x_bytes);
    }
    if (next.first == 0) store_sums<Tile, kTwo>(sums), sums += kTileRows * kTokenBlock;
  }
}

template <class Tile, bool kQuantised>
void multiply_tiles(const Product& p, void* scratch, float* sums) {
  auto multiply = multiply_blocks<Tile, kQuantised>;
  if constexpr (kQuantised) {
    if (p.tokens <= kTileTokens) {
      multiply = multiply_near<Tile, false>;
    } else if (p.tokens <= kNearTokens) {
      multiply = multiply_near<Tile, true>;
    }
  }
  Tile::configure();
  multiply(p, static_cast<char*>(scratch), sums);
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

// ---------------------------------------------------------------------------------------------------------------------
// Where rows go; row(r, t): sixteen tokens from t on of row r.

// Rows of numbers, `stride` apart, one for each token.
struct AsTokens {
  template <class Row>
  static void put(int64_t rows, int64_t tokens, const Row& row, void* out, int64_t stride) {
    for (int64_t t = 0; t < tokens; t += kTileTokens)
      for (int64_t r = 0; r < rows; r += 16) {
        __m512i block[16];
        for (int64_t i = 0; i < 16; ++i) block[i] = _mm512_castps_si512(row(std::min(r + i, rows - 1), t));
        auto* const to = static_cast<Bf16*>(out) + t * stride + r;
        const int64_t some = rows - r;
        columns16(block, [&](int64_t token, __m512i words) {
          if (t + token >= tokens) return;
          if (some >= 16) return Avx512::store_in_order(to + token * stride, _mm512_castsi512_ps(words));
          Bf16 line[16];
          Avx512::store_in_order(line, _mm512_castsi512_ps(words));
          std::copy_n(line, some, to + token * stride);
        });
      }
  }
};

// Prepared tokens, whose blocks are block_bytes apart; zeros up to the step. Their products take what is subnormal as
// zero, as this rounding does.
struct AsPairs {
  template <class Row>
  static void put(int64_t rows, int64_t tokens, const Row& row, void* out, int64_t block_bytes) {
    for (int64_t t = 0; t < tokens; t += kTileTokens) {
      char* to = static_cast<char*>(out) + t / kTileTokens * block_bytes;
      for (int64_t r = 0; r < rounded(rows, kPairStep); r += 2, to += 64) {
        const __m512 second = r + 1 < rows ? row(r + 1, t) : _mm512_setzero_ps();
        _mm512_storeu_si512(to, r < rows ? pairs_of(row(r, t), second) : _mm512_setzero_si512());
      }
    }
  }
};

inline __m512 biased(const float* sums, const float* bias, int64_t row, int64_t token) {
  return _mm512_add_ps(_mm512_load_ps(sums + row * kTokenBlock + token), _mm512_set1_ps(bias[row]));
}

inline void store_rows(const float* sums, const float* bias, int64_t rows, int64_t tokens, void* out, int64_t stride) {
  AsTokens::put(rows, tokens, [&](int64_t r, int64_t t) { return biased(sums, bias, r, t); }, out, stride);
}

template <class To>
void activate_rows(const Activation& by, Pairing pairing, const float* sums, const float* ups, const float* bias,
                   const float* up_bias, int64_t columns, int64_t tokens, void* out, int64_t stride) {
  const bool interleaved = pairing == Pairing::kInterleaved;
  const int64_t step = interleaved ? 2 : 1, apart = interleaved ? 1 : 0;
  if (interleaved) ups = sums, up_bias = bias;
  with_curve<Avx512>(by, [&]<class Of, class Plain>(Of, Plain) {
    const auto row = [&](int64_t r, int64_t t) __attribute__((always_inline)) {
      const __m512 gate = biased(sums, bias, step * r, t);
      if (pairing == Pairing::kUngated) return curve<Avx512, Of, Plain::value>(by, gate);
      return gated<Avx512, Of, Plain::value>(by, gate, biased(ups, up_bias, step * r + apart, t));
    };
    To::put(columns, tokens, row, out, stride);
  });
}

template <class Tile, bool kQuantised>
Kernel tile_kernel() {
  return {.step = kPairStep,
          .element_bytes = 2,
          .gap_bytes = 0,
          .token_step = kTileTokens,
          .in_place = false,
          .scratch_bytes = kTileScratch,
          .multiply = multiply_tiles<Tile, kQuantised>,
          .multiply_transposed = nullptr,
          .turn = turn16,
          .prepare = prepare_tiles,
          .store = store_rows,
          .activate = activate_rows<AsTokens>,
          .unpacking = unpacking_pairs,
          .by_rows = true,
          .activate_prepared = activate_rows<AsPairs>};
}

template <class Tile>
Kernel tile_kernel_for(WeightType weight) {
  return weight == WeightType::kQuantized ? tile_kernel<Tile, true>() : tile_kernel<Tile, false>();
}

}  // namespace
}  // namespace moelight
