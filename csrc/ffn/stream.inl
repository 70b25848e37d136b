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
constexpr int64_t kStreamLead = 4096;  // bytes ahead that memory is asked for
template <class P>
constexpr int64_t kStreamRoom = 448 * P::kLineBytes;  // of tokens

// One row after the other, each block after block of K, for tokens whose lines lie beside each other in x: line k of
// all, then line k + 1.
template <class Stored, class P, int kCount>
void stream_rows(const Product& p, const char* x, float* sums) {
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
      const char* token = x + k / 32 * P::kLineBytes * kCount;
      Stored::lines(p, r, k, std::min(blocks.size, p.depth - k), ahead + Stored::bytes(k), [&](__m512i weight) {
        const typename P::Line line = P::of(weight);
#pragma GCC unroll 4
        for (int c = 0; c < kCount; ++c, token += P::kLineBytes) sum[c] = P::madd(sum[c], line, P::load(token));
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

template <class P>
bool streams(const Product& p) {
  return p.tokens <= kStreamTokens && p.depth % 32 == 0 &&
         stream_count(p.tokens) * p.depth / 32 * P::kLineBytes <= kStreamRoom<P>;
}

// The tokens' lines beside each other, and zeros for a token that is not there.
template <class P>
void beside(const Product& p, int64_t head, int64_t count, char* to) {
  for (int64_t k = head; k < head + 2 * p.depth; k += kStepBytes)
    for (int64_t c = 0; c < count; ++c, to += P::kLineBytes)
      P::store(to, P::token(c < p.tokens ? _mm512_loadu_si512(p.x + c * p.x_bytes + k) : _mm512_setzero_si512()));
}

template <class Stored, class P = typename Stored::Lanes>
void multiply_few(const Product& p, void* scratch, float* sums) {
  const bool grouped = Stored::kGroups && p.group < p.depth;
  if (grouped || !streams<P>(p)) return multiply<Stored, P>(p, scratch, sums);
  const Subnormals zeros(true);
  auto* const x = static_cast<char*>(scratch);
  const int64_t count = stream_count(p.tokens);
  beside<P>(p, Stored::kHead, count, x);
  if (count == 1) {
    stream_rows<Stored, P, 1>(p, x, sums);
  } else if (count == 2) {
    stream_rows<Stored, P, 2>(p, x, sums);
  } else {
    stream_rows<Stored, P, kStreamTokens>(p, x, sums);
  }
  Stored::finish(p, sums);
}

// bf16 as stored: between so many tokens it is faster to multiply pairs, which are read as they lie, than to convert
// them first (docs/log.md).
constexpr int64_t kFewestPairs = 3, kMostPairs = 24;
inline void multiply_halves(const Product& p, void* scratch, float* sums) {
  const bool pairs = p.tokens >= kFewestPairs && p.tokens <= kMostPairs;
  return pairs ? multiply_few<StoredBf16>(p, scratch, sums) : multiply_few<StoredBf16, Halves>(p, scratch, sums);
}

// The product with a quantised matrix: with few tokens lines meet them as they are unpacked.
template <class P>
void multiply_quantized(const Product& p, void* scratch, float* sums) {
  const Unpacking& by = p.unpacking;
  if (by.one == nullptr || !streams<P>(p)) return multiply_unpacked<P>(p, scratch, sums);
  const Subnormals zeros(false);
  auto* const x = static_cast<char*>(scratch);
  const int64_t count = stream_count(p.tokens);
  beside<P>(p, 0, count, x);
  const SumRows sum = count == 1 ? by.one : count == 2 ? by.two : by.four;
  for (int64_t r = 0; r < p.rows; r += kSummedRows)
    sum(*p.quantized, p.first_row + r, std::min<int64_t>(kSummedRows, p.rows - r), x,
        p.lead_of(r, rows_ahead(p, kSummedRows, kStreamLead)), p.tokens, sums + r, kUnitRows);
}

}  // namespace
}  // namespace moelight
