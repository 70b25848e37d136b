// Products with two to four tokens, bound by memory: rows of bf16 pass by once, one after the other as they lie, and
// every line of them meets all tokens, which stay in the first-level cache. The sums are those of dots.inl, bit for
// bit.
//
// A simple stream is what the processor reads at full rate beside ten cycles of products a line. It has to be whole: by
// parts of rows it is slower than dots.inl, as it is with more tokens, which leave it no room (docs/log.md).
#pragma once

#include "dots.inl"

namespace moelight {
namespace {

constexpr int64_t kStreamTokens = 4;
constexpr int64_t kStreamLead = 4096;      // bytes ahead that memory is asked for
constexpr int64_t kStreamRoom = 28 << 10;  // of tokens, beside the stream in the first-level cache

// found[c] = x[c] . row, for tokens whose lines lie beside each other: line k of all, then line k + 1.
inline void stream_row(const char* row, int64_t bytes, const char* ahead, const char* x, float (&found)[kRows]) {
  __m512 sum[kRows];
#pragma GCC unroll 8
  for (int c = 0; c < kRows; ++c) sum[c] = Pairs::zero();
  for (const char* const end = row + bytes; row < end; row += kStepBytes, ahead += kStepBytes) {
    _mm_prefetch(ahead, _MM_HINT_T0);
    const __m512i weight = _mm512_loadu_si512(row);
#pragma GCC unroll 4
    for (int c = 0; c < kStreamTokens; ++c, x += kStepBytes)
      sum[c] = Pairs::madd(sum[c], weight, _mm512_loadu_si512(x));
  }
  _mm256_storeu_ps(found, across(sum));
}

inline bool streams(const Product& p) {
  return p.tokens > 1 && p.tokens <= kStreamTokens && p.depth % StoredBf16::kStep == 0 &&
         kStreamTokens * 2 * p.depth <= kStreamRoom;
}

// The tokens' lines beside each other: line k of all before line k + 1, and zeros for tokens that are not there.
inline void beside(const Product& p, char* to) {
  for (int64_t k = 0; k < 2 * p.depth; k += kStepBytes)
    for (int64_t c = 0; c < kStreamTokens; ++c, to += kStepBytes)
      _mm512_store_si512(to, c < p.tokens ? _mm512_loadu_si512(p.x + c * p.x_bytes + k) : _mm512_setzero_si512());
}

// One row after the other, each block after block of K.
inline void multiply_streams(const Product& p, void* scratch, float* sums) {
  auto* const x = static_cast<char*>(scratch);
  beside(p, x);
  const Blocks blocks(p.depth);
  const int64_t lead = (kStreamLead + p.row_bytes - 1) / p.row_bytes;
  const char* row = p.weight;
  for (int64_t r = 0; r < p.rows; ++r, row += p.row_bytes) {
    const char* ahead = row;  // nothing new
    if (r + lead < p.rows) {
      ahead = row + lead * p.row_bytes;
    } else if (p.next != nullptr) {
      ahead = p.next + (r + lead - p.rows) * p.next_bytes;
    }
    for (int64_t k = 0; k < p.depth; k += blocks.size) {
      float found[kRows];
      stream_row(row + 2 * k, 2 * std::min(blocks.size, p.depth - k), ahead + 2 * k, x + 2 * k * kStreamTokens, found);
      for (int64_t c = 0; c < p.tokens; ++c) sums[c * kUnitRows + r] += found[c];
    }
  }
}

}  // namespace
}  // namespace moelight
