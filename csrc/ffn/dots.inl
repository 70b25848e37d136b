// Products of bf16 activations with weights as dot products along K (AVX512_BF16). Included by the file
// that is compiled with those; all of it has internal linkage.
//
// A register tile is kRows rows times up to kTokens tokens. Its rows' block stays in the first-level cache while all
// tokens pass by, so what the second-level cache has to deliver is the tokens, a quarter of a line for each product.
// The rows are read where they lie if they are bf16 and whole, else converted into the first-level cache. The first
// passes of tokens fetch the rows that come next, each its share, so that memory is asked for at an even pace.
#pragma once

#include <immintrin.h>

#include <algorithm>

#include "finish.h"
#include "moelight/cpu.h"
#include "moelight/simd_avx512.h"
#include "pair_rows.h"
#include "pairs.h"
#include "streams.h"

namespace moelight {
namespace {

constexpr int kRows = 8, kTokens = 3;
constexpr int64_t kStepBytes = 64;
// A row converted to lines; the rows fall into different cache sets.
template <class P>
constexpr int64_t kBufferRow = kMostBlock / 32 * P::kLineBytes + kStepBytes;
// Activations up to this size stay in the second-level cache: then rows are read to their end, one tile after the
// other, instead of block after block.
constexpr int64_t kStayingBytes = 384 << 10;
constexpr int64_t kLeadBytes = 16 << 10;  // at least so far ahead memory is asked for

// What is fetched while a tile is multiplied: `rows` times as many lines as a row's block has, either one after the
// other, in the order that memory likes best, or rows of a block.
struct Ahead {
  const char* data;  // null: nothing
  int64_t stride;    // of rows; 0: one after the other
  int64_t rows = kRows;
};

// Rows of one block of K, equally far from each other: numbers as they are stored, or lines.
struct Rows {
  const char* data;
  int64_t stride, bytes;
  Ahead ahead;
};

// Row r of eight, by sums of few registers.
struct Strides {
  int64_t one, three, five, seven;
  explicit Strides(int64_t s) : one(s), three(3 * s), five(5 * s), seven(7 * s) {}
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
      case 5:
        return p + five;
      case 6:
        return p + 2 * three;
      default:
        return p + seven;
    }
  }
};

inline void add_across(const __m512 (&v)[kRows], float* sums) {
  _mm256_storeu_ps(sums, _mm256_add_ps(_mm256_loadu_ps(sums), across(v)));
}

// sums[c][0..kRows) += x[c] . row[0..kRows), fetching kFetch rows' lines from `ahead` on.
template <class P, bool kLines, int kCount, int kFetch, int kHint>
void tile(const Rows& rows, const char* ahead, const char* x, int64_t x_bytes, float* sums) {
  __m512 sum[kCount][kRows];
#pragma GCC unroll 3
  for (int c = 0; c < kCount; ++c)
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) sum[c][r] = _mm512_setzero_ps();
  const Strides strides(rows.stride), leads(rows.ahead.stride == 0 ? kStepBytes : rows.ahead.stride);
  const int64_t lead_step = rows.ahead.stride == 0 ? kFetch * kStepBytes : kStepBytes;
  const char* row = rows.data;
  const char* const end = row + rows.bytes;
  for (; row < end; row += kLines ? P::kLineBytes : kStepBytes, x += kStepBytes, ahead += lead_step) {
    typename P::Line token[kCount];
#pragma GCC unroll 3
    for (int c = 0; c < kCount; ++c) token[c] = P::of(_mm512_loadu_si512(x + c * x_bytes));
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      if (r < kFetch) _mm_prefetch(leads.row(ahead, r), static_cast<_mm_hint>(kHint));
      const char* const from = strides.row(row, r);
      const typename P::Line weight = kLines ? P::load(from) : P::of(_mm512_loadu_si512(from));
#pragma GCC unroll 3
      for (int c = 0; c < kCount; ++c) sum[c][r] = P::madd(sum[c][r], weight, token[c]);
    }
  }
#pragma GCC unroll 3
  for (int c = 0; c < kCount; ++c) add_across(sum[c], sums + c * kUnitRows);
}

template <class P, bool kLines, int kFetch, int kHint = _MM_HINT_T0>
void tile_of(int64_t count, const Rows& rows, const char* ahead, const char* x, int64_t x_bytes, float* sums) {
  if (count == 3) return tile<P, kLines, 3, kFetch, kHint>(rows, ahead, x, x_bytes, sums);
  if (count == 2) return tile<P, kLines, 2, kFetch, kHint>(rows, ahead, x, x_bytes, sums);
  tile<P, kLines, 1, kFetch, kHint>(rows, ahead, x, x_bytes, sums);
}

// Whether the first-level cache holds `bytes` of tokens beside what is asked for ahead; else that would push them out,
// and is left to the second level.
inline bool near_holds(int64_t bytes) { return bytes + kLeadBytes <= near_cache_bytes(); }

// As tile_of, fetching `share` rows' lines into the cache of `kHint`.
template <class P, bool kLines, int kHint>
void tile_ahead(int64_t share, int64_t count, const Rows& rows, const char* ahead, const char* x, int64_t x_bytes,
                float* sums) {
  switch (share) {
    case 1:
      return tile_of<P, kLines, 1, kHint>(count, rows, ahead, x, x_bytes, sums);
    case 2:
      return tile_of<P, kLines, 2, kHint>(count, rows, ahead, x, x_bytes, sums);
    case 3:
      return tile_of<P, kLines, 3, kHint>(count, rows, ahead, x, x_bytes, sums);
    case 4:
      return tile_of<P, kLines, 4, kHint>(count, rows, ahead, x, x_bytes, sums);
    default:
      return tile_of<P, kLines, 8, kHint>(count, rows, ahead, x, x_bytes, sums);
  }
}

// Of `rows` ahead those, [first, last), that a pass fetches, and whether into the first-level cache: of few passes each
// its share; of many the first ones a row each into the second level, and the last ones the same into the first, if
// that holds what lies ahead beside what is read.
struct Share {
  int64_t first, last;
  bool near;
  Share(int64_t rows, int64_t pass, int64_t passes, bool twice, bool near)
      : first(rows * pass / passes), last(rows * (pass + 1) / passes), near(near) {
    if (!twice) return;
    const int64_t again = pass - (passes - rows), row = again < 0 ? pass : again;
    first = std::min(row, rows), last = std::min(row + 1, rows), this->near = again >= 0;
  }
};

// All tokens, in passes of nearly equal size; each fetches its share of what lies ahead. A token alone leaves that to
// the hardware, which sees nothing but eight rows read from end to end: 1.02 of the read roof, 0.94 when asked.
template <class P, bool kLines>
void all_tokens(const Rows& rows, int64_t tokens, const char* x, int64_t x_bytes, float* sums) {
  const int64_t passes = (tokens + kTokens - 1) / kTokens;
  const bool near = !asks_second() && near_holds(tokens * rows.bytes);
  const bool twice = passes >= 2 * kRows && 3 * kRows * rows.bytes <= near_cache_bytes();
  const int64_t fetched_row = kLines ? rows.bytes / P::kLineBytes * kStepBytes : rows.bytes;
  for (int64_t i = 0, begin = 0; i < passes; ++i) {
    const int64_t end = tokens * (i + 1) / passes, count = end - begin;
    const Share share(rows.ahead.rows, i, passes, twice, near);
    const char* const from = x + begin * x_bytes;
    float* const to = sums + begin * kUnitRows;
    const char* const ahead =
        rows.ahead.data + share.first * (rows.ahead.stride == 0 ? fetched_row : rows.ahead.stride);
    if (rows.ahead.data == nullptr || share.last == share.first || tokens == 1) {
      tile_of<P, kLines, 0>(count, rows, nullptr, from, x_bytes, to);
    } else if (share.near) {
      tile_ahead<P, kLines, _MM_HINT_T0>(share.last - share.first, count, rows, ahead, from, x_bytes, to);
    } else {
      tile_ahead<P, kLines, _MM_HINT_T1>(share.last - share.first, count, rows, ahead, from, x_bytes, to);
    }
    begin = end;
  }
}

// ---------------------------------------------------------------------------------------------------------------------

// A tile of rows in a block of K: where it lies, and what is read after it.
struct TilePosition {
  int64_t row, first, size;
  Ahead ahead;
};

// Rows of codes in at least so many bytes, of which `step` are read at once.
inline int64_t rows_ahead(const Product& p, int64_t step, int64_t bytes) {
  return step * ((bytes + step * p.row_bytes - 1) / (step * p.row_bytes));
}

// The product tile by tile. Rows of eight whose block is whole are read in place if the lanes take pairs.
template <class P>
void multiply_tile(const Product& p, const TilePosition& at, char* buffer, float* sums) {
  const char* const x = p.x + 2 * at.first;
  Rows rows = {p.weight + at.row * p.row_bytes + 2 * at.first, p.row_bytes, 2 * rounded(at.size, kPairStep), at.ahead};
  const int64_t row_count = p.rows - at.row < kRows ? p.rows - at.row : kRows;
  constexpr bool kLines = P::kLineBytes != kStepBytes;  // which are not as bf16 is stored
  if (kLines || row_count < kRows || at.size % kPairStep != 0) {
    const char* ahead = at.ahead.data == nullptr ? p.weight : at.ahead.data;
    const int64_t lead = at.ahead.data == nullptr ? 0 : at.ahead.stride != 0 ? at.ahead.stride : 2 * at.size;
    for (int64_t r = 0; r < kRows; ++r, ahead += lead) {
      // A short last tile repeats its last row; nobody reads those sums.
      const int64_t row = at.row + (r < row_count ? r : row_count - 1);
      convert_row<P>(p, row, at.first, at.size, ahead, buffer + r * kBufferRow<P>);
    }
    rows.data = buffer, rows.stride = kBufferRow<P>, rows.bytes = rows.bytes / kStepBytes * P::kLineBytes;
    rows.ahead.data = nullptr;
  }
  all_tokens<P, kLines>(rows, p.tokens, x, p.x_bytes, sums + at.row);
}

// All blocks of a tile, then the next tile, so that memory is read in its own order. What is fetched is a tile some way
// ahead, line after line; where that is too much to lie beside this one, it is the next block.
template <class P>
void multiply_rows(const Product& p, char* buffer, float* sums) {
  const DepthBlocks blocks(p.depth);
  const int64_t tiles = (p.rows + kRows - 1) / kRows, tile_bytes = kRows * p.row_bytes;
  const bool by_tiles = blocks.count == 1 || tile_bytes <= 2 * kLeadBytes;
  const int64_t lead = by_tiles ? std::min(tiles, (kLeadBytes + tile_bytes - 1) / tile_bytes) : 1;
  for (int64_t i = 0; i < tiles; ++i) {
    const char* next = p.weight + (i + lead) * tile_bytes;
    if (i + lead >= tiles) next = p.next == nullptr ? nullptr : p.next + (i + lead - tiles) * kRows * p.next_bytes;
    for (int64_t first = 0; first < p.depth; first += blocks.size) {
      const int64_t size = std::min(blocks.size, p.depth - first);
      Ahead ahead = {next, i + lead < tiles ? p.row_bytes : p.next_bytes};
      if (by_tiles) {
        ahead = {next == nullptr ? nullptr : next + kRows * 2 * first, 0};
      } else if (first + size < p.depth) {
        ahead.data = p.weight + i * tile_bytes + 2 * (first + size), ahead.stride = p.row_bytes;
      }
      multiply_tile<P>(p, {i * kRows, first, size, ahead}, buffer, sums);
    }
  }
}

// All tiles of one block, then the next.
template <class P>
void multiply_blocks(const Product& p, char* buffer, float* sums) {
  const DepthBlocks blocks(p.depth);
  for (int64_t first = 0; first < p.depth; first += blocks.size) {
    const int64_t size = std::min(blocks.size, p.depth - first);
    for (int64_t row = 0; row < p.rows; row += kRows) {
      Ahead ahead = {p.next, p.next_bytes};
      if (row + kRows < p.rows) {
        ahead = {p.weight + (row + kRows) * p.row_bytes + 2 * first, p.row_bytes};
      } else if (first + size < p.depth) {
        ahead = {p.weight + 2 * (first + size), p.row_bytes};
      }
      multiply_tile<P>(p, {row, first, size, ahead}, buffer, sums);
    }
  }
}

template <class P>
void multiply(const Product& p, void* scratch, float* sums) {
  const Subnormals zeros(true);
  auto* const buffer = static_cast<char*>(scratch);
  if (2 * p.tokens * p.depth <= kStayingBytes) {
    multiply_rows<P>(p, buffer, sums);
  } else {
    multiply_blocks<P>(p, buffer, sums);
  }
}

// The product with a quantised matrix: a tile's block is unpacked into the first-level cache, where all tokens meet it
// and fetch the codes that come next, at an even pace.
template <class P>
void multiply_unpacked(const Product& p, void* scratch, float* sums) {
  auto* const buffer = static_cast<char*>(scratch);
  const DepthBlocks blocks(p.depth);
  const auto meet = [&](int64_t row, int64_t first, bool by_rows) {
    const int64_t size = std::min(blocks.size, p.depth - first), rows = std::min<int64_t>(kRows, p.rows - row);
    const int64_t ahead = rows_ahead(p, kRows, kLeadBytes), lead = p.lead_of(row, ahead);
    if (first == 0) p.fetch_scales(row, ahead, rows);
    p.unpacking.unpack(*p.quantized, p.first_row + row, rows, first, size, by_rows ? 0 : lead, buffer, kBufferRow<P>);
    // Of a short last tile some rows are an earlier one's; nobody reads those sums.
    Rows tile = {buffer, kBufferRow<P>, rounded(size, kUnpackStep) / 32 * P::kLineBytes, {nullptr, 0}};
    if (by_rows && lead != 0) {
      const int64_t before = kRows * p.row_bytes * first / p.depth;
      tile.ahead = {p.weight + row * p.row_bytes + lead + before, 0, (kRows * p.row_bytes / 2 + p.depth - 1) / p.depth};
    }
    const Subnormals zeros(true);
    all_tokens<P, true>(tile, p.tokens, p.x + 2 * first, p.x_bytes, sums + row);
  };
  if (2 * p.tokens * p.depth <= kStayingBytes) {
    for (int64_t row = 0; row < p.rows; row += kRows)
      for (int64_t first = 0; first < p.depth; first += blocks.size) meet(row, first, true);
  } else {
    for (int64_t first = 0; first < p.depth; first += blocks.size)
      for (int64_t row = 0; row < p.rows; row += kRows) meet(row, first, false);
  }
}

inline void prepare(const void* x, int64_t x_bytes, int64_t count, int64_t depth, void* out) {
  const int64_t bytes = 2 * rounded(depth, kPairStep);
  for (int64_t t = 0; t < count; ++t) {
    const char* from = static_cast<const char*>(x) + t * x_bytes;
    arrange(reinterpret_cast<const Bf16*>(from), depth, static_cast<char*>(out) + t * bytes);
  }
}

}  // namespace
}  // namespace moelight
