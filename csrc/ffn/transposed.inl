// Products with transposed weights, [depth, rows], over a SIMD type S: lanes run along the rows, and a sum takes
// the elements of K one after the other, whatever stands beside it. Internal linkage: every instruction set has its own
// copy.
//
// With few tokens a line passes by once, kDeep of them side by side, and every number meets all tokens. With more,
// kDeepBlock lines of kUnitRows numbers are widened into the second-level cache, as panels that stream past a tile of
// tokens, whose sums are in registers. Both fetch what they read next.
#pragma once

#include <cstring>

#include "ffn.h"

namespace moelight {
namespace {

constexpr int64_t kDeep = 8, kDeepBlock = 256;
constexpr int64_t kTransposedScratch = kDeepBlock * kUnitRows * static_cast<int64_t>(sizeof(float));

// Tokens whose sums of two vectors fit the registers.
template <class S>
constexpr int kTransposedTokens = S::kWidth == 16  ? 12
                                  : S::kWidth == 8 ? 6
                                                   : 4;

template <class S>
constexpr int64_t kPair = 2 * S::kWidth;

// The sums of row n of the first token.
inline float* sums_of(const Product& p, int64_t n, float* sums) {
  return sums + n / kUnitRows * p.tokens * kUnitRows + n % kUnitRows;
}

template <class S, class W>
inline void load_pair(const W* from, int64_t count, typename S::V& a, typename S::V& b) {
  if (count >= kPair<S>) return S::load2_in_order(from, a, b);
  W part[kPair<S>] = {};
  std::memcpy(part, from, static_cast<size_t>(count) * sizeof(W));
  S::load2_in_order(part, a, b);
}

// sums[c][n..] += x[c][k..k + deep) times that many lines.
template <class S, class W, int kTokens>
__attribute__((always_inline)) inline void add_lines(const Product& p, int64_t k, int64_t deep, int64_t n, int64_t lead,
                                                     float* to) {
  typename S::V a[kTokens], b[kTokens];
#pragma GCC unroll 12
  for (int c = 0; c < kTokens; ++c) {
    a[c] = S::load(to + c * kUnitRows), b[c] = S::load(to + c * kUnitRows + S::kWidth);
  }
  const char* from = p.weight + k * p.row_bytes + n * static_cast<int64_t>(sizeof(W));
  const char* x = p.x + k * static_cast<int64_t>(sizeof(float));
#pragma GCC unroll 8
  for (int64_t r = 0; r < deep; ++r, from += p.row_bytes, x += sizeof(float)) {
    typename S::V low, high;
    __builtin_prefetch(from + lead, 0, 3);
    load_pair<S>(reinterpret_cast<const W*>(from), p.rows - n, low, high);
#pragma GCC unroll 12
    for (int c = 0; c < kTokens; ++c) {
      const auto token = S::set(*reinterpret_cast<const float*>(x + c * p.x_bytes));
      a[c] = S::fma(low, token, a[c]), b[c] = S::fma(high, token, b[c]);
    }
  }
#pragma GCC unroll 12
  for (int c = 0; c < kTokens; ++c) {
    S::store(to + c * kUnitRows, a[c]), S::store(to + c * kUnitRows + S::kWidth, b[c]);
  }
}

template <class S, class W, int kTokens>
void transposed_few(const Product& p, float* sums) {
  for (int64_t k = 0; k < p.depth; k += kDeep) {
    const int64_t lead = k + 2 * kDeep <= p.depth ? kDeep * p.row_bytes : 0;
    for (int64_t n = 0; n < p.rows; n += kPair<S>) {
      float* const to = sums_of(p, n, sums);
      if (k + kDeep <= p.depth) {
        add_lines<S, W, kTokens>(p, k, kDeep, n, lead, to);
      } else {
        add_lines<S, W, kTokens>(p, k, p.depth - k, n, lead, to);
      }
    }
  }
}

// sums[c] += x[c] times `deep` lines of a panel.
template <class S, int kTokens>
void transposed_tile(const float* panel, int64_t deep, const char* x, int64_t x_bytes, float* sums) {
  typename S::V a[kTokens], b[kTokens];
#pragma GCC unroll 12
  for (int c = 0; c < kTokens; ++c)
    a[c] = S::load(sums + c * kUnitRows), b[c] = S::load(sums + c * kUnitRows + S::kWidth);
  for (int64_t k = 0; k < deep; ++k, panel += kPair<S>, x += sizeof(float)) {
    const auto low = S::load(panel), high = S::load(panel + S::kWidth);
#pragma GCC unroll 12
    for (int c = 0; c < kTokens; ++c) {
      const auto token = S::set(*reinterpret_cast<const float*>(x + c * x_bytes));
      a[c] = S::fma(low, token, a[c]), b[c] = S::fma(high, token, b[c]);
    }
  }
#pragma GCC unroll 12
  for (int c = 0; c < kTokens; ++c)
    S::store(sums + c * kUnitRows, a[c]), S::store(sums + c * kUnitRows + S::kWidth, b[c]);
}

template <class S, int kTokens>
void transposed_tile_of(int64_t tokens, const float* panel, int64_t deep, const char* x, int64_t x_bytes, float* sums) {
  if (tokens == kTokens) {
    transposed_tile<S, kTokens>(panel, deep, x, x_bytes, sums);
  } else if constexpr (kTokens > 1) {
    transposed_tile_of<S, kTokens - 1>(tokens, panel, deep, x, x_bytes, sums);
  }
}

// Lines as panels of floats, kPair numbers of each line beside those of the next, zeros for numbers that are not there;
// `lead`: from what is read to what is fetched.
template <class S, class W>
void widen_lines(const char* from, int64_t line_bytes, int64_t deep, int64_t rows, int64_t lead, float* to) {
  for (int64_t k = 0; k < deep; ++k, from += line_bytes, to += kPair<S>) {
    const auto* line = reinterpret_cast<const W*>(from);
    for (int64_t n = 0; n < rows; n += kPair<S>) {
      typename S::V low, high;
      __builtin_prefetch(reinterpret_cast<const char*>(line + n) + lead, 0, 2);
      load_pair<S>(line + n, rows - n, low, high);
      float* const panel = to + n * kDeepBlock;
      S::store(panel, low), S::store(panel + S::kWidth, high);
    }
  }
}

template <class S, class W>
void transposed_many(const Product& p, float* panels, float* sums) {
  constexpr int kTokens = kTransposedTokens<S>;
  const int64_t tiles = (p.tokens + kTokens - 1) / kTokens;
  for (int64_t k = 0; k < p.depth; k += kDeepBlock) {
    const int64_t deep = p.depth - k < kDeepBlock ? p.depth - k : kDeepBlock;
    for (int64_t n = 0; n < p.rows; n += kUnitRows) {
      const int64_t rows = p.rows - n < kUnitRows ? p.rows - n : kUnitRows;
      int64_t lead = kUnitRows * static_cast<int64_t>(sizeof(W));
      if (n + kUnitRows >= p.rows) lead = k + 2 * kDeepBlock <= p.depth ? kDeepBlock * p.row_bytes : 0;
      widen_lines<S, W>(p.weight + k * p.row_bytes + n * static_cast<int64_t>(sizeof(W)), p.row_bytes, deep, rows, lead,
                        panels);
      const char* const x = p.x + k * static_cast<int64_t>(sizeof(float));
      for (int64_t i = 0, begin = 0; i < tiles; ++i) {
        const int64_t end = p.tokens * (i + 1) / tiles;
        for (int64_t at = 0; at < rows; at += kPair<S>)
          transposed_tile_of<S, kTokens>(end - begin, panels + at * kDeepBlock, deep, x + begin * p.x_bytes, p.x_bytes,
                                         sums_of(p, n, sums) + begin * kUnitRows + at);
        begin = end;
      }
    }
  }
}

template <class S, class W, int kTokens = kTransposedTokens<S>>
void multiply_transposed(const Product& p, void* scratch, float* sums) {
  if (p.tokens > kTokens) return transposed_many<S, W>(p, static_cast<float*>(scratch), sums);
  if constexpr (kTokens > 1) {
    if (p.tokens < kTokens) return multiply_transposed<S, W, kTokens - 1>(p, scratch, sums);
  }
  transposed_few<S, W, kTokens>(p, sums);
}

}  // namespace
}  // namespace moelight
