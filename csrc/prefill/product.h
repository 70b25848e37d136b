// The one product of prefill: rows of words, one after the other spread over all lanes, times a packed block. A row's
// sums do not depend on the other rows, and words of zero change nothing.
#pragma once

#include <cstdint>

namespace moelight {
namespace {

struct PromptProduct {
  const float* a;  // [rows, steps] words, rows a_stride apart; rows a multiple of S::kTileRows
  int64_t a_stride, rows, steps;
  const float* b;  // [steps, lanes] words, rows b_stride apart; lanes a multiple of S::kWidth
  int64_t b_stride, lanes;
  float* c;  // [rows, lanes]
  int64_t c_stride;
  const float* factor;  // [rows]: c = factor * c + a b; null: c = a b
};

// The loops over a tile are unrolled by name: left to itself gcc 12 carries the sums through memory.
template <class M, int kVectors>
void product_tile(const PromptProduct& p, int64_t row, int64_t lane) {
  using S = typename M::Lanes;
  constexpr int kRows = S::kTileRows;
  typename S::V sum[kRows][kVectors];
  float* const c = p.c + row * p.c_stride + lane;
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int u = 0; u < kVectors; ++u) sum[r][u] = S::zero();
  if (p.factor) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const auto factor = S::set(p.factor[row + r]);
#pragma GCC unroll 8
      for (int u = 0; u < kVectors; ++u) sum[r][u] = S::mul(S::load(c + r * p.c_stride + u * S::kWidth), factor);
    }
  }
  const float* a = p.a + row * p.a_stride;
  const float* b = p.b + lane;
  for (int64_t k = 0; k < p.steps; ++k, ++a, b += p.b_stride) {
    typename S::V right[kVectors];
#pragma GCC unroll 8
    for (int u = 0; u < kVectors; ++u) right[u] = S::load(b + u * S::kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const auto left = S::set(a[r * p.a_stride]);
#pragma GCC unroll 8
      for (int u = 0; u < kVectors; ++u) sum[r][u] = M::multiply_add(left, right[u], sum[r][u]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int u = 0; u < kVectors; ++u) S::store(c + r * p.c_stride + u * S::kWidth, sum[r][u]);
}

// The block's lanes stay in the first-level cache while the rows pass over them.
template <class M, int kVectors = M::Lanes::kTileVectors>
void multiply(const PromptProduct& p, int64_t lane = 0) {
  using S = typename M::Lanes;
  for (; lane + kVectors * S::kWidth <= p.lanes; lane += kVectors * S::kWidth)
    for (int64_t row = 0; row < p.rows; row += S::kTileRows) product_tile<M, kVectors>(p, row, lane);
  if constexpr (kVectors > 1) multiply<M, kVectors - 1>(p, lane);
}

}  // namespace
}  // namespace moelight
