// Products with one to four tokens, bound by memory: rows pass by once, one or a few side by side as they lie, and
// every line of them meets all tokens, which stay in the first-level cache. The sums are those of dots.inl, bit for
// bit.
//
// A simple stream is what the processor reads at full rate beside ten cycles of products a line. Rows side by side have
// more sums, which do not wait for each other, and share each line of a token that is loaded. A stream has to be whole:
// by parts of rows it is slower than dots.inl, as it is with more tokens, which leave it no room (docs/log.md).
#pragma once

#include <type_traits>

#include "dots.inl"

namespace moelight {
namespace {

constexpr int64_t kStreamTokens = 4;
// Bytes ahead that memory is asked for: of bf16 that Halves multiply, and of formats that are unpacked.
constexpr int64_t kStreamLead = 4 << 10, kUnpackedLead = 8 << 10;
template <class P>
constexpr int64_t kStreamBytes = 448 * P::kLineBytes;  // of tokens

// One row after the other, each block after block of K, for tokens whose lines lie beside each other in x: line k of
// all, then line k + 1.
template <class P, int kCount>
void stream_rows(const Product& p, const char* x, int64_t lead_bytes, float* sums) {
  const DepthBlocks blocks(p.depth);
  const int64_t lead = (lead_bytes + p.row_bytes - 1) / p.row_bytes;
  for (int64_t r = 0; r < p.rows; ++r) {
    const char* ahead = p.weight + r * p.row_bytes;  // nothing new
    if (r + lead < p.rows) {
      ahead += lead * p.row_bytes;
    } else if (p.next != nullptr) {
      ahead = p.next + (r + lead - p.rows) * p.next_bytes;
    }
    for (int64_t k = 0; k < p.depth; k += blocks.size) {
      __m512 sum[kCount];
#pragma GCC unroll 4
      for (int c = 0; c < kCount; ++c) sum[c] = _mm512_setzero_ps();
      const char* token = x + k / 32 * P::kLineBytes * kCount;
      const char *from = p.weight + r * p.row_bytes + 2 * k, *fetched = ahead + 2 * k;
      const char* const end = from + 2 * std::min(blocks.size, p.depth - k);
      for (; from < end; from += kStepBytes, fetched += kStepBytes) {
        _mm_prefetch(fetched, _MM_HINT_T0);
        const typename P::Line line = P::of(_mm512_loadu_si512(from));
#pragma GCC unroll 4
        for (int c = 0; c < kCount; ++c, token += P::kLineBytes) sum[c] = P::madd(sum[c], line, P::load(token));
      }
      __m512 eight[kRows];
#pragma GCC unroll 8
      for (int c = 0; c < kRows; ++c) eight[c] = c < kCount ? sum[c] : _mm512_setzero_ps();
      float dots[kRows];
      _mm256_storeu_ps(dots, across(eight));
      for (int64_t c = 0; c < p.tokens; ++c) sums[c * kUnitRows + r] += dots[c];
    }
  }
}

// kSide rows at once, and what is left of them by stream_rows.
template <class P, int kSide, int kCount, int kHint>
void stream_tiles(const Product& p, const char* x, int64_t lead_bytes, float* sums) {
  const DepthBlocks blocks(p.depth);
  const int64_t tile_bytes = kSide * p.row_bytes, lead = (lead_bytes + tile_bytes - 1) / tile_bytes * kSide;
  int64_t row = 0;
  for (; row + kSide <= p.rows; row += kSide) {
    const char* ahead = p.weight + row * p.row_bytes;  // nothing new
    if (row + lead < p.rows) {
      ahead += lead * p.row_bytes;
    } else if (p.next != nullptr) {
      ahead = p.next + (row + lead - p.rows) * p.next_bytes;
    }
    const char* const first = p.weight + row * p.row_bytes;
    for (int64_t k = 0; k < p.depth; k += blocks.size) {
      __m512 sum[kCount * kSide];
#pragma GCC unroll 32
      for (int i = 0; i < kCount * kSide; ++i) sum[i] = _mm512_setzero_ps();
      const char* token = x + k / 32 * P::kLineBytes * kCount;
      const char* from = first + 2 * k;
      const char* const end = from + 2 * std::min(blocks.size, p.depth - k);
      for (; from < end; from += kStepBytes, token += P::kLineBytes * kCount) {
        typename P::Line weight[kSide];
#pragma GCC unroll 8
        for (int r = 0; r < kSide; ++r, ahead += kStepBytes) {
          _mm_prefetch(ahead, static_cast<_mm_hint>(kHint));
          weight[r] = P::of(_mm512_loadu_si512(from + r * p.row_bytes));
        }
#pragma GCC unroll 8
        for (int c = 0; c < kCount; ++c) {
          const typename P::Line line = P::load(token + c * P::kLineBytes);
#pragma GCC unroll 8
          for (int r = 0; r < kSide; ++r) sum[c * kSide + r] = P::madd(sum[c * kSide + r], weight[r], line);
        }
      }
      float dots[(kCount * kSide + kRows - 1) / kRows * kRows];
#pragma GCC unroll 4
      for (int i = 0; i < kCount * kSide; i += kRows) {
        __m512 eight[kRows];
#pragma GCC unroll 8
        for (int j = 0; j < kRows; ++j) eight[j] = i + j < kCount * kSide ? sum[i + j] : _mm512_setzero_ps();
        _mm256_storeu_ps(dots + i, across(eight));
      }
      for (int64_t c = 0; c < p.tokens; ++c)
        for (int r = 0; r < kSide; ++r) sums[c * kUnitRows + row + r] += dots[c * kSide + r];
    }
  }
  if (row == p.rows) return;
  Product rest = p;
  rest.weight += row * p.row_bytes, rest.rows -= row;
  stream_rows<P, kCount>(rest, x, lead_bytes, sums + row);
}

// The size of kStreamTokenCounts that `tokens` take.
constexpr int stream_size(int64_t tokens) {
  int size = 0;
  while (kStreamTokenCounts[size] < tokens) ++size;
  return size;
}

constexpr int64_t stream_count(int64_t tokens) { return kStreamTokenCounts[stream_size(tokens)]; }

template <class P>
bool streams(const Product& p) {
  return p.tokens <= kStreamTokens && p.depth % 32 == 0 &&
         stream_count(p.tokens) * p.depth / 32 * P::kLineBytes <= kStreamBytes<P>;
}

// Only pairs have a choice of forms.
template <class P>
constexpr bool kHasForms = std::is_same_v<P, Pairs>;

template <class P>
bool in_tiles(int64_t tokens) {
  return kHasForms<P> && kStreamForms[stream_form(stream_size(tokens))].rows == 0;
}

// The tokens' lines beside each other, and zeros for a token that is not there.
template <class P>
void beside(const Product& p, int64_t count, char* to) {
  for (int64_t k = 0; k < 2 * p.depth; k += kStepBytes)
    for (int64_t c = 0; c < count; ++c, to += P::kLineBytes)
      P::store(to, P::token(c < p.tokens ? _mm512_loadu_si512(p.x + c * p.x_bytes + k) : _mm512_setzero_si512()));
}

template <class P, int kSide, int kCount>
void stream_side_by_side(const Product& p, const char* x, const StreamForm& form, float* sums) {
  if (!form.second && near_holds(kCount * p.depth * 2))
    return stream_tiles<P, kSide, kCount, _MM_HINT_T0>(p, x, form.lead, sums);
  stream_tiles<P, kSide, kCount, _MM_HINT_T1>(p, x, form.lead, sums);
}

template <class P, int kSize>
void stream(const Product& p, const char* x, float* sums) {
  constexpr int kCount = kStreamTokenCounts[kSize];
  if constexpr (kHasForms<P>) {
    const StreamForm& form = kStreamForms[stream_form(kSize)];
    if (form.rows == 4) return stream_side_by_side<P, 4, kCount>(p, x, form, sums);
    if (form.second) return stream_tiles<P, 1, kCount, _MM_HINT_T1>(p, x, form.lead, sums);
    stream_rows<P, kCount>(p, x, form.lead, sums);
  } else {
    stream_rows<P, kCount>(p, x, kStreamLead, sums);
  }
}

template <class P>
void multiply_few(const Product& p, void* scratch, float* sums) {
  if (!streams<P>(p) || in_tiles<P>(p.tokens)) return multiply<P>(p, scratch, sums);
  const Subnormals zeros(true);
  auto* const x = static_cast<char*>(scratch);
  beside<P>(p, stream_count(p.tokens), x);
  switch (stream_size(p.tokens)) {
    case 0:
      stream<P, 0>(p, x, sums);
      break;
    case 1:
      stream<P, 1>(p, x, sums);
      break;
    default:
      stream<P, 2>(p, x, sums);
  }
}

// bf16 as stored: between so many tokens it is faster to multiply pairs, which are read as they lie, than to convert
// them first (docs/log.md).
constexpr int64_t kMinPairs = 3, kMaxPairs = 24;
inline void multiply_halves(const Product& p, void* scratch, float* sums) {
  const bool pairs = p.tokens >= kMinPairs && p.tokens <= kMaxPairs;
  return pairs ? multiply_few<Pairs>(p, scratch, sums) : multiply_few<Halves>(p, scratch, sums);
}

// The product with a quantised matrix: with few tokens lines meet them as they are unpacked.
template <class P>
void multiply_quantized(const Product& p, void* scratch, float* sums) {
  const Unpacking& by = p.unpacking;
  if (by.one == nullptr || !streams<P>(p)) return multiply_unpacked<P>(p, scratch, sums);
  const Subnormals zeros(false);
  auto* const x = static_cast<char*>(scratch);
  const int64_t count = stream_count(p.tokens);
  beside<P>(p, count, x);
  const SumRows sum = count == 1 ? by.one : count == 2 ? by.two : by.four;
  const int64_t step = summed_rows(count), ahead = rows_ahead(p, step, kUnpackedLead);
  for (int64_t r = 0; r < p.rows; r += step) {
    p.fetch_scales(r, ahead, step);
    sum(*p.quantized, p.first_row + r, std::min(step, p.rows - r), x, p.lead_of(r, ahead), p.tokens, sums + r,
        kUnitRows);
  }
}

}  // namespace
}  // namespace moelight
