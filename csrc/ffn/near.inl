// Products of pairs of bf16 as they are stored with as many tokens as the first-level cache holds beside some rows: the
// tokens stay there while rows pass by, four at a time. The sums are those of dots.inl, bit for bit.
//
// Sixteen sums, of four rows and four tokens, leave the processor room to add them across their lanes while it
// multiplies for the next. Memory is asked for twice, into the first level for the next four rows and into the second
// for those after them: further ahead the first would push tokens out, and nearer memory is late (docs/log.md).
#pragma once

#include "stream.inl"

namespace moelight {
namespace {

constexpr int kSide = 4;  // rows, and tokens, of a tile
constexpr int64_t kMinNear = 8;
constexpr int64_t kRowsBytes = 16 << 10;  // of the first-level cache, left to rows

// sums[c][0..4) of two tokens, or of one.
__attribute__((always_inline)) inline void add_side(const __m512 (&v)[kRows], bool two, float* sums) {
  const __m256 dots = across_inline(v);
  _mm_storeu_ps(sums, _mm_add_ps(_mm_loadu_ps(sums), _mm256_castps256_ps128(dots)));
  if (two) {
    float* const next = sums + kUnitRows;
    _mm_storeu_ps(next, _mm_add_ps(_mm_loadu_ps(next), _mm256_extractf128_ps(dots, 1)));
  }
}

// Lines that are fetched into the first and the second level: of one row or two, `bytes` apart.
struct NextLines {
  const char *near, *far;
  int64_t near_bytes, far_bytes;
};

// sums[c][0..4) += x[c] . row[0..4) over `bytes`, fetching kFetch rows' lines.
template <int kCount, int kFetch>
__attribute__((noinline)) void side_by_side(const char* row, int64_t row_bytes, int64_t bytes, const char* x,
                                            int64_t x_bytes, float* sums, const NextLines& fetched) {
  __m512 sum[kCount][kSide];
#pragma GCC unroll 4
  for (int c = 0; c < kCount; ++c)
#pragma GCC unroll 4
    for (int r = 0; r < kSide; ++r) sum[c][r] = _mm512_setzero_ps();
  const Strides rows(row_bytes), tokens(x_bytes);
  const char *near = fetched.near, *far = fetched.far;
  const int64_t next_near = fetched.near_bytes, next_far = fetched.far_bytes;
  for (const char* const end = row + bytes; row < end; row += kStepBytes, x += kStepBytes) {
    __m512i token[kCount];
#pragma GCC unroll 4
    for (int c = 0; c < kCount; ++c) token[c] = _mm512_loadu_si512(tokens.row(x, c));
    if constexpr (kFetch > 0) {
      _mm_prefetch(near, _MM_HINT_T0), _mm_prefetch(far, _MM_HINT_T1);
      if (kFetch > 1) _mm_prefetch(near + next_near, _MM_HINT_T0), _mm_prefetch(far + next_far, _MM_HINT_T1);
      near += kStepBytes, far += kStepBytes;
    }
#pragma GCC unroll 4
    for (int r = 0; r < kSide; ++r) {
      const __m512i weight = _mm512_loadu_si512(rows.row(row, r));
#pragma GCC unroll 4
      for (int c = 0; c < kCount; ++c) sum[c][r] = Pairs::madd(sum[c][r], weight, token[c]);
    }
  }
#pragma GCC unroll 2
  for (int c = 0; c < kCount; c += 2) {
    __m512 eight[kRows];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i)
      eight[i] = c + i / kSide < kCount ? sum[c + i / kSide][i % kSide] : _mm512_setzero_ps();
    add_side(eight, c + 1 < kCount, sums + c * kUnitRows);
  }
}

using SideBySide = void (*)(const char*, int64_t, int64_t, const char*, int64_t, float*, const NextLines&);

template <int kCount>
SideBySide fetching(int64_t rows) {
  constexpr SideBySide all[] = {side_by_side<kCount, 0>, side_by_side<kCount, 1>, side_by_side<kCount, 2>};
  return all[rows];
}

// Some tokens, from `begin` on, and the first row of a tile that is fetched beside them.
struct Pass {
  SideBySide run;
  int64_t begin, fetched;
};

// Passes of nearly equal size, at least two, so that none fetches more than two rows.
struct Passes {
  int64_t count;
  Pass all[kTokenBlock / kSide];

  explicit Passes(int64_t tokens) : count(std::max<int64_t>(2, (tokens + kSide - 1) / kSide)) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t begin = tokens * i / count, some = tokens * (i + 1) / count - begin;
      const int64_t fetched = kSide * i / count, rows = kSide * (i + 1) / count - fetched;
      const auto run = some == 4 ? fetching<4> : some == 3 ? fetching<3> : some == 2 ? fetching<2> : fetching<1>;
      all[i] = {run(rows), begin, fetched};
    }
  }
};

// Rows of a block of K, from some row on.
struct RowsFrom {
  const char* data;
  int64_t bytes;  // from row to row
};

// All rows of a block pass: `bytes` of each from `rows` on, and `after` them what is read next.
inline void pass_rows(const Product& p, const Passes& passes, int64_t first, int64_t bytes, const RowsFrom& after,
                      float* sums) {
  const RowsFrom rows = {p.weight + 2 * first, p.row_bytes};
  const auto at = [&](int64_t i) {
    return i < p.rows ? RowsFrom{rows.data + i * rows.bytes, rows.bytes}
                      : RowsFrom{after.data + (i - p.rows) * after.bytes, after.bytes};
  };
  for (int64_t row = 0; row < p.rows; row += kSide) {
    const RowsFrom near = at(row + kSide), far = at(row + 2 * kSide);
    for (int64_t i = 0; i < passes.count; ++i) {
      const Pass& pass = passes.all[i];
      pass.run(rows.data + row * rows.bytes, rows.bytes, bytes, p.x + pass.begin * p.x_bytes + 2 * first, p.x_bytes,
               sums + pass.begin * kUnitRows + row,
               {near.data + pass.fetched * near.bytes, far.data + pass.fetched * far.bytes, near.bytes, far.bytes});
    }
  }
}

// Block after block of K; p.rows is a multiple of kSide.
inline void multiply_near(const Product& p, float* sums) {
  const DepthBlocks blocks(p.depth);
  const Passes passes(p.tokens);
  for (int64_t first = 0; first < p.depth; first += blocks.size) {
    const int64_t bytes = 2 * std::min(blocks.size, p.depth - first);
    RowsFrom after = {p.weight + 2 * first + bytes, p.row_bytes};
    if (2 * first + bytes == 2 * p.depth)
      after = p.next == nullptr ? RowsFrom{p.weight, p.row_bytes} : RowsFrom{p.next, p.next_bytes};
    pass_rows(p, passes, first, bytes, after, sums);
  }
}

// How many parts of the tokens stay near, one after the other; 0: they are left to dots.inl. Several pay where a block
// is short, so that sums are added across their lanes often.
inline int64_t near_parts(const Product& p) {
  constexpr int64_t kShortBlock = 512;
  if (p.tokens < kMinNear || p.depth % 32 != 0) return 0;
  const int64_t size = DepthBlocks(p.depth).size, cache_bytes = near_cache_bytes() - kRowsBytes;
  const int64_t parts = (2 * p.tokens * size + cache_bytes - 1) / cache_bytes;
  return parts == 1 || size <= kShortBlock ? parts : 0;
}

inline void multiply_pairs(const Product& p, void* scratch, float* sums) {
  const int64_t parts = near_parts(p), rows = p.rows / kSide * kSide;
  if (parts == 0) return multiply_few<Pairs>(p, scratch, sums);
  const Subnormals zeros(true);
  for (int64_t i = 0; i < parts; ++i) {
    const int64_t begin = p.tokens * i / parts;
    Product part = p;
    part.rows = rows, part.x += begin * p.x_bytes, part.tokens = p.tokens * (i + 1) / parts - begin;
    if (i + 1 < parts) part.next = p.weight, part.next_bytes = p.row_bytes;
    multiply_near(part, sums + begin * kUnitRows);
  }
  if (rows == p.rows) return;
  Product rest = p;
  rest.weight += rows * p.row_bytes, rest.rows -= rows;
  multiply<Pairs>(rest, scratch, sums + rows);
}

}  // namespace
}  // namespace moelight
