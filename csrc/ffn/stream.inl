// Products with one to four tokens, bound by memory: rows pass by once, one after the other as they lie, and every line
// of them meets all tokens, which stay in the first-level cache. The sums are those of dots.inl, bit for
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

// One row after the other, each block after block of K, for tokens whose lines lie beside each other in x: line k of
// all, then line k + 1.
template <class Stored, int kCount>
void stream_rows(const Product& p, const char* x, float* sums) {
  using P = typename Stored::Lanes;
  const Blocks blocks(p.depth);
  const int64_t lead = (kStreamLead + p.row_bytes - 1) / p.row_bytes;
  for (int64_t r = 0; r < p.rows; ++r) {
    const char* ahead = p.weight + r * p.row_bytes;  // nothing new
    if (r + lead < p.rows) {
      ahead += lead * p.row_bytes;
    } else if (p.next != nullptr) {
      ahead = p.next + (r + lead - p.rows) * p.next_bytes;
    }
    for (int64_t k = 0; k < p.depth; k += blocks.size) {
      typename P::V sum[kCount];
#pragma GCC unroll 4
      for (int c = 0; c < kCount; ++c) sum[c] = P::zero();
      const char* token = x + 2 * k * kCount;
      Stored::lines(p, r, k, std::min(blocks.size, p.depth - k), ahead + Stored::bytes(k), [&](__m512i weight) {
#pragma GCC unroll 4
        for (int c = 0; c < kCount; ++c, token += kStepBytes)
          sum[c] = P::madd(sum[c], weight, _mm512_loadu_si512(token));
      });
      __m512 eight[kRows];
#pragma GCC unroll 8
      for (int c = 0; c < kRows; ++c) eight[c] = c < kCount ? P::floats(sum[c]) : _mm512_setzero_ps();
      float found[kRows];
      _mm256_storeu_ps(found, across(eight));
      for (int64_t c = 0; c < p.tokens; ++c) sums[c * kUnitRows + r] += found[c];
    }
  }
}

inline int64_t stream_count(int64_t tokens) { return tokens == 3 ? 4 : tokens; }

template <class Stored>
bool streams(const Product& p) {
  const bool grouped = Stored::kGroups && p.group < p.depth;
  return !grouped && p.tokens <= kStreamTokens && p.depth % Stored::kStep == 0 &&
         stream_count(p.tokens) * 2 * p.depth <= kStreamRoom;
}

// The tokens' lines beside each other, and zeros for a token that is not there.
inline void beside(const Product& p, int64_t head, int64_t count, char* to) {
  for (int64_t k = head; k < head + 2 * p.depth; k += kStepBytes)
    for (int64_t c = 0; c < count; ++c, to += kStepBytes)
      _mm512_store_si512(to, c < p.tokens ? _mm512_loadu_si512(p.x + c * p.x_bytes + k) : _mm512_setzero_si512());
}

template <class Stored>
void multiply_few(const Product& p, void* scratch, float* sums) {
  if (!streams<Stored>(p)) return multiply<Stored>(p, scratch, sums);
  auto* const x = static_cast<char*>(scratch);
  const int64_t count = stream_count(p.tokens);
  beside(p, Stored::kHead, count, x);
  if (count == 1) {
    stream_rows<Stored, 1>(p, x, sums);
  } else if (count == 2) {
    stream_rows<Stored, 2>(p, x, sums);
  } else {
    stream_rows<Stored, kStreamTokens>(p, x, sums);
  }
  Stored::finish(p, sums);
}

}  // namespace
}  // namespace moelight
