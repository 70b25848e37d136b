// Products of bf16 activations in float32 lanes, for AVX2; internal linkage.
//
// A word holds a pair of bf16: its even number is the word shifted left, its odd one the word without its low half, so
// that weights and tokens are read as they lie and widened in registers. The sum of one (token, row) in a block of K
// has eight lanes, and each takes the even number of its pair, then the odd one; after the block the lanes are added in
// a fixed tree. So neither other tokens nor the tile change a bit.
//
// A register tile is up to kTileRows rows times up to two tokens, twelve sums for two multiply-adds a cycle of four
// cycles each. The first tokens widen the rows on their way and keep them in the first-level cache for the others; what
// the second level has to deliver is tokens, half a line for twelve products. Each pass of tokens fetches its share of
// the rows that come next.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "ffn.h"
#include "finish.h"
#include "moelight/simd_avx2.h"
#include "pair_lanes_avx2.h"
#include "streams.h"

namespace moelight {
namespace {

constexpr int kTileRows = 6, kPassTokens = 2, kMaxSums = 12;
constexpr int64_t kDepthBlock = 512, kPairStep = 32, kStepBytes = 64;
// A row widened: of sixteen numbers the even ones, then the odd ones. Rows fall into different cache sets.
constexpr int64_t kWideStep = 2 * kStepBytes, kWideRow = kDepthBlock * 4 + 64;
constexpr int64_t kLeadBytes = 16 << 10;  // that memory is asked for ahead
// Activations up to this size stay in the second-level cache: then rows are read to their end, one tile after the
// other, instead of block after block.
constexpr int64_t kStayingBytes = 192 << 10;

inline __m256i load_pairs(const char* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// Row r of six, by sums of few registers.
struct Strides {
  int64_t one, three, five;
  explicit Strides(int64_t s) : one(s), three(3 * s), five(5 * s) {}
  const char* row(const char* p, int r) const {
    switch (r) {
      case 0:
        return p;
      case 1:
        return p + one;
      case 2:
        return p + 2 * one;
      case 3:
        return p + three;
      case 4:
        return p + 4 * one;
      default:
        return p + five;
    }
  }
};

// Lines that a pass asks for meanwhile: `count` of each step, `stride` apart.
struct Ahead {
  const char* at;
  int64_t stride, step;
  int count;

  template <int kHint>
  inline __attribute__((always_inline)) void fetch() {
    const char* line = at;
    for (int i = 0; i < count; ++i, line += stride) _mm_prefetch(line, static_cast<_mm_hint>(kHint));
    at += step;
  }
};

// Some rows in one block of K, some tokens, and where the sums of their products go.
struct PairPass {
  const char* rows;  // pairs, row_bytes apart
  int64_t row_bytes, steps;
  char* wide;  // the same, widened
  const char* x;
  int64_t x_bytes;
  float* sums;  // kUnitRows apart
};

// kWidened: the rows have been widened; kKeep: they are to be.
template <int kRows, int kTokens, bool kWidened, bool kKeep, int kHint>
void pass(const PairPass& p, Ahead ahead) {
  __m256 sum[kTokens][kRows];
#pragma GCC unroll 4
  for (int c = 0; c < kTokens; ++c)
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) sum[c][r] = _mm256_setzero_ps();
  const Strides strides(p.row_bytes);
  const char *row = p.rows, *x = p.x;
  const int64_t x_bytes = p.x_bytes;
  char* wide = p.wide;
  for (int64_t i = 0; i < p.steps; ++i) {
    ahead.fetch<kHint>();
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; ++odd) {
        __m256 token[kTokens];
#pragma GCC unroll 4
        for (int c = 0; c < kTokens; ++c) {
          const __m256i pairs = load_pairs(x + c * x_bytes + 32 * half);
          token[c] = odd == 0 ? even_of(pairs) : odd_of(pairs);
        }
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r) {
          auto* const to = reinterpret_cast<float*>(wide + r * kWideRow + 64 * half + 32 * odd);
          __m256 weight;
          if constexpr (kWidened) {
            weight = _mm256_load_ps(to);
          } else {
            const __m256i pairs = load_pairs(strides.row(row, r) + 32 * half);
            weight = odd == 0 ? even_of(pairs) : odd_of(pairs);
            if constexpr (kKeep) _mm256_store_ps(to, weight);
          }
#pragma GCC unroll 4
          for (int c = 0; c < kTokens; ++c) sum[c][r] = madd(sum[c][r], weight, token[c]);
        }
        // Pairs are loaded again for their odd numbers: sums leave no register to keep them.
        if constexpr (kRows * kTokens > 8) asm volatile("" ::: "memory");
      }
    }
    row += kStepBytes, x += kStepBytes, wide += kWideStep;
  }
#pragma GCC unroll 4
  for (int c = 0; c < kTokens; ++c) add_across<kRows>(sum[c], p.sums + c * kUnitRows);
}

// Lines that lie ahead of a tile in a block of K: as many rows as the tile has, either one after the other, in the
// order that memory likes best, or `stride` apart.
struct Next {
  const char* data;  // null: nothing
  int64_t stride;    // 0: one after the other

  // Those of `count` rows after the first `done`.
  Ahead rows(int64_t done, int64_t count, int64_t steps) const {
    if (data == nullptr) return {nullptr, 0, 0, 0};
    if (stride != 0) return {data + done * stride, stride, kStepBytes, static_cast<int>(count)};
    return {data + done * steps * kStepBytes, kStepBytes, count * kStepBytes, static_cast<int>(count)};
  }
};

// All tokens, two at a time; if the rows are not widened, more than one.
template <int kRows>
void all_passes(PairPass p, int64_t tokens, bool widened, const Next& next) {
  const int64_t passes = (tokens + kPassTokens - 1) / kPassTokens;
  for (int64_t i = 0, begin = 0, fetched = 0; i < passes; ++i) {
    const int64_t end = std::min(tokens, begin + kPassTokens), share = kRows * (i + 1) / passes - fetched;
    const Ahead ahead = next.rows(fetched, share, p.steps);
    if (i == 0 && !widened) {
      pass<kRows, 2, false, true, _MM_HINT_T1>(p, ahead);
    } else if (end - begin == 1) {
      pass<kRows, 1, true, false, _MM_HINT_T1>(p, ahead);
    } else {
      pass<kRows, 2, true, false, _MM_HINT_T1>(p, ahead);
    }
    p.x += (end - begin) * p.x_bytes, p.sums += (end - begin) * kUnitRows;
    fetched += share, begin = end;
  }
}

// All tokens at once, whose sums fit the registers.
template <int kRows, int kHint, int kTokens = 4>
void one_pass(const PairPass& p, int64_t tokens, const Ahead& ahead) {
  if constexpr (kRows * kTokens <= kMaxSums) {
    if (tokens == kTokens) return pass<kRows, kTokens, false, false, kHint>(p, ahead);
  }
  if constexpr (kTokens > 1) one_pass<kRows, kHint, kTokens - 1>(p, tokens, ahead);
}

template <int kRows>
void tile(const PairPass& p, int64_t tokens, bool widened, bool second, const Next& next) {
  if (widened || tokens > 4 || tokens * kRows > kMaxSums) return all_passes<kRows>(p, tokens, widened, next);
  const Ahead ahead = next.rows(0, kRows, p.steps);
  second ? one_pass<kRows, _MM_HINT_T1>(p, tokens, ahead) : one_pass<kRows, _MM_HINT_T0>(p, tokens, ahead);
}

template <int kRows = kTileRows>
void tile_of(int64_t rows, const PairPass& p, int64_t tokens, bool widened, bool second, const Next& next) {
  if (rows == kRows) return tile<kRows>(p, tokens, widened, second, next);
  if constexpr (kRows > 1) tile_of<kRows - 1>(rows, p, tokens, widened, second, next);
}

// ---------------------------------------------------------------------------------------------------------------------
// A row in one block of K, widened, zeros up to the step; touches the lines from `ahead` on.
inline void widen_row(const Product& p, int64_t row, int64_t first, int64_t size, const char* ahead, char* wide) {
  const char* from = p.weight + row * p.row_bytes + 2 * first;
  for (int64_t i = 0; ahead != nullptr && i < 2 * size; i += kStepBytes) _mm_prefetch(ahead + i, _MM_HINT_T1);
  for (int64_t k = 0; k < size; k += kPairStep, from += kStepBytes, wide += kWideStep) {
    char rest[kStepBytes] = {};
    const char* some = from;
    if (size - k < kPairStep) some = static_cast<char*>(std::memcpy(rest, from, static_cast<size_t>(2 * (size - k))));
    for (int half = 0; half < 2; ++half) {
      const __m256i pairs = load_pairs(some + 32 * half);
      auto* const to = reinterpret_cast<float*>(wide + 64 * half);
      _mm256_store_ps(to, even_of(pairs)), _mm256_store_ps(to + 8, odd_of(pairs));
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------

// How many rows a tile has at most, how far ahead memory is asked for, and into which cache.
struct TileShape {
  int64_t rows, lead;
  bool second;
};

// Up to four tokens take the form that was chosen, if the rows are pairs; of tiles as many rows as leave room for them.
template <bool kQuantised>
TileShape shape_for(int64_t tokens) {
  if (kQuantised || tokens > 4) return {kTileRows, kLeadBytes, true};
  const StreamForm& form = kStreamForms[stream_form(tokens == 1 ? 0 : tokens == 2 ? 1 : 2)];
  if (form.rows > 0) return {form.rows, form.lead, form.second};
  return {std::min<int64_t>(kTileRows, kMaxSums / tokens), kLeadBytes, true};
}

template <bool kQuantised>
void multiply_tile(const Product& p, int64_t row, int64_t rows, int64_t first, const TileShape& shape, const Next& next,
                   char* wide, float* sums) {
  const int64_t size = std::min(kDepthBlock, p.depth - first);
  PairPass pass = {kQuantised ? nullptr : p.weight + row * p.row_bytes + 2 * first,
                   p.row_bytes,
                   (size + kPairStep - 1) / kPairStep,
                   wide,
                   p.x + 2 * first,
                   p.x_bytes,
                   sums + row};
  const bool widened = kQuantised || size % kPairStep != 0;
  Next left = next;
  if constexpr (kQuantised) {
    const int64_t ahead = rows * ((kLeadBytes + rows * p.row_bytes - 1) / std::max<int64_t>(1, rows * p.row_bytes));
    p.unpacking.unpack(*p.quantized, p.first_row + row, rows, first, size, p.lead_of(row, ahead), wide, kWideRow);
    left.data = nullptr;
  } else if (widened) {
    const char* ahead = next.data;
    for (int64_t r = 0; r < rows; ++r) {
      widen_row(p, row + r, first, size, ahead, wide + r * kWideRow);
      if (ahead != nullptr) ahead += next.stride == 0 ? 2 * size : next.stride;
    }
    left.data = nullptr;
  }
  tile_of(rows, pass, p.tokens, widened, shape.second, left);
}

// Few tokens, beside each other and widened, meet quantised rows as these are unpacked.
constexpr int64_t kFewTokens = 4, kBesideBytes = 256 << 10;

// How many tokens lie beside each other where there are `tokens`.
constexpr int64_t beside_count(int64_t tokens) { return tokens == 3 ? 4 : tokens; }

inline bool sums_unpacked(const Product& p) {
  return p.unpacking.one != nullptr && p.tokens <= kFewTokens && p.depth % kPairStep == 0 &&
         beside_count(p.tokens) * p.depth * 4 <= kBesideBytes;
}

inline void widen_beside(const Product& p, float* to) {
  const int64_t count = beside_count(p.tokens);
  for (int64_t k = 0; k < 2 * p.depth; k += kStepBytes) {
    for (int64_t c = 0; c < count; ++c) {
      for (int64_t half = 0; half < kStepBytes; half += 32, to += 16) {
        const __m256i pairs = c < p.tokens ? load_pairs(p.x + c * p.x_bytes + k + half) : _mm256_setzero_si256();
        _mm256_store_ps(to, even_of(pairs)), _mm256_store_ps(to + 8, odd_of(pairs));
      }
    }
  }
}

inline void multiply_few(const Product& p, float* tokens, float* sums) {
  widen_beside(p, tokens);
  const int64_t side = summed_rows(p.tokens);
  const SumRows sum = p.tokens == 1 ? p.unpacking.one : p.tokens == 2 ? p.unpacking.two : p.unpacking.four;
  for (int64_t row = 0; row < p.rows; row += side) {
    const int64_t ahead = side * ((kLeadBytes + side * p.row_bytes - 1) / std::max<int64_t>(1, side * p.row_bytes));
    sum(*p.quantized, p.first_row + row, std::min(side, p.rows - row), reinterpret_cast<const char*>(tokens),
        p.lead_of(row, ahead), p.tokens, sums + row, kUnitRows);
  }
}

// Tiles of nearly equal size. By rows what is fetched is the memory `lead` bytes after what is read; by blocks it is
// the next tile's rows.
template <bool kQuantised>
void multiply_pairs(const Product& p, void* scratch, float* sums) {
  if (kQuantised && sums_unpacked(p)) return multiply_few(p, static_cast<float*>(scratch), sums);
  const TileShape shape = shape_for<kQuantised>(p.tokens);
  const int64_t tiles = (p.rows + shape.rows - 1) / shape.rows, all = p.rows * p.row_bytes;
  auto* const wide = static_cast<char*>(scratch);
  const auto begin = [&](int64_t i) { return p.rows * i / tiles; };
  if (2 * p.tokens * p.depth <= kStayingBytes) {
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t row = begin(i), rows = begin(i + 1) - row;
      for (int64_t first = 0; first < p.depth; first += kDepthBlock) {
        const int64_t at = row * p.row_bytes + rows * 2 * first + shape.lead;
        const char* const after = p.next == nullptr ? nullptr : p.next + (at - all);
        const bool prefetches = shape.lead != 0 && p.weight != nullptr;
        const Next next = {!prefetches ? nullptr : at < all ? p.weight + at : after, 0};
        multiply_tile<kQuantised>(p, row, rows, first, shape, next, wide, sums);
      }
    }
    return;
  }
  for (int64_t first = 0; first < p.depth; first += kDepthBlock) {
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t row = begin(i), end = begin(i + 1);
      Next next = {p.next, p.next_bytes};
      if (p.weight == nullptr) {
        next.data = nullptr;
      } else if (i + 1 < tiles) {
        next = {p.weight + end * p.row_bytes + 2 * first, p.row_bytes};
      } else if (first + kDepthBlock < p.depth) {
        next = {p.weight + 2 * (first + kDepthBlock), p.row_bytes};
      }
      multiply_tile<kQuantised>(p, row, end - row, first, shape, next, wide, sums);
    }
  }
}

inline void prepare_pairs(const void* x, int64_t x_bytes, int64_t count, int64_t depth, void* out) {
  const int64_t bytes = 2 * depth, padded = 2 * ((depth + kPairStep - 1) / kPairStep * kPairStep);
  auto* to = static_cast<char*>(out);
  for (int64_t t = 0; t < count; ++t, to += padded) {
    std::memcpy(to, static_cast<const char*>(x) + t * x_bytes, static_cast<size_t>(bytes));
    std::memset(to + bytes, 0, static_cast<size_t>(padded - bytes));
  }
}

template <bool kQuantised>
Kernel pairs_kernel() {
  return {.step = kPairStep,
          .element_bytes = 2,
          .gap_bytes = 0,
          .token_step = 1,
          .in_place = true,
          .scratch_bytes = kQuantised ? std::max(kTileRows * kWideRow, kBesideBytes) : kTileRows * kWideRow,
          .multiply = multiply_pairs<kQuantised>,
          .multiply_transposed = nullptr,
          .turn = nullptr,
          .prepare = prepare_pairs,
          .store = store<Avx2, Bf16>,
          .activate = activate<Avx2, Bf16>};
}

}  // namespace
}  // namespace moelight
