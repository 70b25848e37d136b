// Products of bf16 activations with bf16 weights, or with quantised ones rounded to bf16, in float32 lanes, for NEON;
// internal linkage.
//
// A word holds a pair of bf16. The sum of one (token, row) in a block of K has eight lanes, and each takes the even
// number of its pair, then the odd one, each product fused into the sum; after the block the lanes are added in a fixed
// tree. That is the order of pairs_avx2.h. Neither other tokens nor the tile change a bit, nor do Products P (below).
//
// A register tile is four rows times up to two tokens. With few tokens the rows are read where they lie; for more they
// are widened into the first-level cache first, where Products gain by it.
#pragma once

#include <algorithm>
#include <cstring>

#include "ffn.h"
#include "finish.h"
#include "moelight/simd_neon.h"
#include "quantized/wide_neon.h"

namespace moelight {
namespace {

constexpr int kPairRows = 4, kPairTokens = 2;
constexpr int64_t kFewPairTokens = 4;
constexpr int64_t kPairBlock = 512, kPairStep = 32, kPairLine = 2 * kPairStep;
constexpr int64_t kWideLine = 4 * kPairStep, kWideRow = 4 * kPairBlock + 64;  // rows fall into different cache sets
// Activations up to this size stay in the second-level cache: then rows are read to their end, one tile after another.
constexpr int64_t kStayingBytes = 192 << 10;

// Sixteen numbers as they are stored, and with their even and odd ones apart.
struct StoredPairs {
  uint32x4_t low, high;
  static constexpr int64_t kLine = kPairLine;
  static StoredPairs load(const char* p, int half) {
    const auto* const from = reinterpret_cast<const Bf16*>(p) + 16 * half;
    return {Neon::words(from), Neon::words(from + 8)};
  }
};
struct WidePairs {
  Neon::V even, odd;
  static constexpr int64_t kLine = kWideLine;
  static WidePairs load(const char* p, int half) {
    const auto* const from = reinterpret_cast<const float*>(p) + 16 * half;
    return {Neon::load(from), Neon::load(from + 8)};
  }
};

// Products: widened by shifts, for every processor.
struct ShiftedPairs {
  static constexpr bool kWidens = true;
  static WidePairs wide(StoredPairs x) {
    return {{Neon::even(x.low), Neon::even(x.high)}, {Neon::odd(x.low), Neon::odd(x.high)}};
  }
  static WidePairs wide(WidePairs x) { return x; }
  template <class W>
  static Neon::V madd(Neon::V sum, W weight, StoredPairs x) {
    const WidePairs left = wide(weight), right = wide(x);
    return Neon::fma(left.odd, right.odd, Neon::fma(left.even, right.even, sum));
  }
};

template <class P, class W, int kTokens>
void pair_tile(const char* const (&rows)[kPairRows], int64_t steps, int64_t lead, const char* x, int64_t x_bytes,
               float* sums) {
  Neon::V sum[kTokens][kPairRows];
#pragma GCC unroll 2
  for (int c = 0; c < kTokens; ++c)
#pragma GCC unroll 4
    for (int r = 0; r < kPairRows; ++r) sum[c][r] = Neon::zero();
  for (int64_t i = 0; i < steps; ++i, x += kPairLine) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      StoredPairs token[kTokens];
#pragma GCC unroll 2
      for (int c = 0; c < kTokens; ++c) token[c] = StoredPairs::load(x + c * x_bytes, half);
#pragma GCC unroll 4
      for (int r = 0; r < kPairRows; ++r) {
        const char* const from = rows[r] + i * W::kLine;
        if (half == 0 && lead != 0) __builtin_prefetch(from + lead, 0, 2);
        const W weight = W::load(from, half);
#pragma GCC unroll 2
        for (int c = 0; c < kTokens; ++c) sum[c][r] = P::madd(sum[c][r], weight, token[c]);
      }
    }
  }
#pragma GCC unroll 2
  for (int c = 0; c < kTokens; ++c) {
    float dots[kPairRows];
    Neon::sum4(sum[c][0], sum[c][1], sum[c][2], sum[c][3], dots);
    for (int r = 0; r < kPairRows; ++r) sums[c * kUnitRows + r] += dots[r];
  }
}

// All tokens; whoever reads the rows first fetches those `lead` bytes after them.
template <class P, class W>
void pair_tiles(const char* const (&rows)[kPairRows], int64_t steps, int64_t lead, const char* x, int64_t x_bytes,
                int64_t tokens, float* sums) {
  for (; tokens >= kPairTokens; tokens -= kPairTokens, x += kPairTokens * x_bytes, sums += kPairTokens * kUnitRows) {
    pair_tile<P, W, kPairTokens>(rows, steps, lead, x, x_bytes, sums);
    lead = 0;
  }
  if (tokens > 0) pair_tile<P, W, 1>(rows, steps, lead, x, x_bytes, sums);
}

// Of a short last tile some rows are the last one again; nobody reads those sums.
template <class P>
void multiply_pair_rows(const Product& p, int64_t row, int64_t first, char* buffer, float* sums) {
  const int64_t size = std::min(kPairBlock, p.depth - first), steps = (size + kPairStep - 1) / kPairStep;
  const bool quantised = p.quantized != nullptr, short_step = size % kPairStep != 0 && !quantised;
  const bool widen = P::kWidens && p.tokens > kFewPairTokens;
  int64_t lead = p.lead_of(row, kPairRows);
  const char* rows[kPairRows];
  alignas(64) char padded[kPairRows][2 * kPairBlock];
  const int64_t last = std::min<int64_t>(kPairRows, p.rows - row) - 1;
  if (quantised)
    p.unpacking.unpack(*p.quantized, p.first_row + row, last + 1, first, size, lead, padded, sizeof padded[0]);
  for (int64_t r = 0; r < kPairRows; ++r) {
    rows[r] = quantised ? padded[std::min(r, last)] : p.weight + (row + std::min(r, last)) * p.row_bytes + 2 * first;
    if (short_step) {
      std::memset(padded[r] + (steps - 1) * kPairLine, 0, kPairLine);
      rows[r] = static_cast<char*>(std::memcpy(padded[r], rows[r], static_cast<size_t>(2 * size)));
    }
    if (!widen) continue;
    auto* to = reinterpret_cast<float*>(buffer + r * kWideRow);
    for (int64_t i = 0; i < 2 * steps; ++i, to += 16) {
      if (i % 2 == 0 && !short_step && !quantised) __builtin_prefetch(rows[r] + i / 2 * kPairLine + lead, 0, 2);
      const WidePairs wide = ShiftedPairs::wide(StoredPairs::load(rows[r] + i / 2 * kPairLine, i % 2));
      Neon::store(to, wide.even), Neon::store(to + 8, wide.odd);
    }
    rows[r] = buffer + r * kWideRow;
  }
  if (short_step || widen || quantised) lead = 0;
  const char* const x = p.x + 2 * first;
  if (widen) return pair_tiles<ShiftedPairs, WidePairs>(rows, steps, 0, x, p.x_bytes, p.tokens, sums + row);
  pair_tiles<P, StoredPairs>(rows, steps, lead, x, p.x_bytes, p.tokens, sums + row);
}

template <class P>
void multiply_pairs(const Product& p, void* scratch, float* sums) {
  auto* const buffer = static_cast<char*>(scratch);
  if (2 * p.tokens * p.depth <= kStayingBytes) {
    for (int64_t row = 0; row < p.rows; row += kPairRows)
      for (int64_t k = 0; k < p.depth; k += kPairBlock) multiply_pair_rows<P>(p, row, k, buffer, sums);
  } else {
    for (int64_t k = 0; k < p.depth; k += kPairBlock)
      for (int64_t row = 0; row < p.rows; row += kPairRows) multiply_pair_rows<P>(p, row, k, buffer, sums);
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

template <class P>
Kernel pairs_kernel() {
  return {.step = kPairStep,
          .element_bytes = 2,
          .gap_bytes = 0,
          .token_step = 1,
          .in_place = true,
          .scratch_bytes = kPairRows * kWideRow,
          .multiply = multiply_pairs<P>,
          .multiply_transposed = nullptr,
          .turn = nullptr,
          .prepare = prepare_pairs,
          .store = store<Neon, Bf16>,
          .activate = activate<Neon, Bf16>,
          .unpacking = [](const Quantized& like) { return Unpacking{unpack_neon_of<Bf16>(like)}; }};
}

}  // namespace
}  // namespace moelight
