// Unpacks quantised matrices for Lanes P (ffn/pairs.h), eight rows at a time where codes are transposed, and multiplies
// rows with few tokens as they are unpacked. Included by one file for each P; all of it has internal linkage.
#pragma once

#include <array>
#include <utility>

#include "lines.h"

namespace moelight {
namespace {

// Rows without lines of their own, and what is left of a row behind whole lines: rounded one by one.
template <class P>
void unpack_singly(const Quantized& q, int64_t row, int64_t rows, int64_t first, int64_t size, int64_t lead, void* to,
                   int64_t to_bytes) {
  for (int64_t r = 0; r < rows; ++r) {
    alignas(64) char pairs[2 * kMostColumns];
    unpack_plainly<Bf16>(q, row + r, 1, first, size, lead, pairs, 0);
    char* const out = static_cast<char*>(to) + r * to_bytes;
    for (int64_t i = 0; 32 * i < size; ++i) P::store(out + i * P::kLineBytes, P::of(_mm512_load_si512(pairs + 64 * i)));
  }
}

template <class P, class Format>
void unpack_rows(const Quantized& q, int64_t row, int64_t rows, int64_t first, int64_t size, int64_t lead, void* to,
                 int64_t to_bytes) {
  const int64_t aligned = size / kUnpackStep * kUnpackStep;
  const Columns columns(q, first, size);
  for (int64_t r = 0; r < rows; ++r) {
    char* out = static_cast<char*>(to) + r * to_bytes;
    const Format format(q, row + r, columns);
    const int64_t lines = format.bounded ? aligned : 0;
    each_run<Format>(q, columns, first + lines, [&](int64_t k, int64_t stop, int64_t group) {
      const auto run = format.run(k, group);
      fetch_run(format, k, lead);
      each_line<Format>(k, stop, [&](int i, auto full) { P::store(out, line_of(run, i, full)), out += P::kLineBytes; });
    });
    if (lines < size) unpack_singly<P>(q, row + r, 1, first + lines, size - lines, 0, out, 0);
  }
}

// Rows of a Format that go side by side.
template <class Format, int kSide>
using RowsBeside = std::array<Format, kSide>;

template <int kSide, class F>
inline __attribute__((always_inline)) auto side_by_side(F&& make) {
  return [&]<int... kRow>(std::integer_sequence<int, kRow...>) __attribute__((always_inline)) {
    return RowsBeside<decltype(make(0)), kSide>{make(kRow)...};
  }(std::make_integer_sequence<int, kSide>());
}

// Adds the products of lines of some columns of rows with kTokens tokens, as they are unpacked.
template <class P, class Format, int kTokens, int kSide, int kSums>
inline __attribute__((always_inline)) void add_lines(const Quantized& q, const RowsBeside<Format, kSide>& rows,
                                                     const Columns& columns, const char* x, const char* ahead,
                                                     __m512 (&sum)[kSums]) {
  each_run<Format>(q, columns, columns.first + columns.size,
                   [&](int64_t k, int64_t stop, int64_t group) __attribute__((always_inline)) {
                     const auto runs = side_by_side<kSide>([&](int r) __attribute__((always_inline)) {
                       return rows[static_cast<size_t>(r)].run(k, group);
                     });
#pragma GCC unroll 32
                     for (int i = 0; i < kSide * kRunBytes<Format> / 64; ++i, ahead += 64)
                       _mm_prefetch(ahead, _MM_HINT_T1);
                     each_line<Format>(k, stop, [&](int i, auto full) __attribute__((always_inline)) {
#pragma GCC unroll 8
                       for (int r = 0; r < kSide; ++r) {
                         const typename P::Line line = line_of(runs[static_cast<size_t>(r)], i, full);
#pragma GCC unroll 4
                         for (int c = 0; c < kTokens; ++c)
                           sum[kSide * c + r] = P::madd(sum[kSide * c + r], line, P::load(x + c * P::kLineBytes));
                       }
                       x += kTokens * P::kLineBytes;
                     });
                   });
}

// The same with rows that are not bounded.
template <class P, int kTokens, int kSide, int kSums>
__attribute__((noinline)) void add_singly(const Quantized& q, const RowsBeside<int64_t, kSide>& rows, int64_t first,
                                          int64_t end, const char* x, __m512 (&sum)[kSums]) {
  alignas(64) char lines[kSide][kMostBlock / 32 * P::kLineBytes];
  for (int r = 0; r < kSide; ++r)
    unpack_singly<P>(q, rows[static_cast<size_t>(r)], 1, first, end - first, 0, lines[r], 0);
  for (int64_t at = 0; at < (end - first) / 32 * P::kLineBytes; at += P::kLineBytes)
    for (int c = 0; c < kTokens; ++c, x += P::kLineBytes)
      for (int r = 0; r < kSide; ++r)
        sum[kSide * c + r] = P::madd(sum[kSide * c + r], P::load(lines[r] + at), P::load(x));
}

// sums[c * stride + r] += x[c] . row r, of at most summed_rows(kTokens) rows. Rows go side by side, so that sums need
// not wait for each other; memory is asked for them as they lie, one after the other.
template <class P, class Format, int kTokens>
void sum_rows(const Quantized& q, int64_t row, int64_t rows, const char* x, int64_t lead, int64_t tokens, float* sums,
              int64_t stride) {
  constexpr int kSide = summed_rows(kTokens), kSums = kSide * kTokens;
  static_assert(kSums % 8 == 0);
  const DepthBlocks blocks(q.columns);
  const int64_t last = row + rows - 1;  // is repeated; nobody reads those sums
  const auto at = side_by_side<kSide>([&](int r) { return std::min(row + r, last); });
  const char* const codes = reinterpret_cast<const char*>(q.codes) + row * q.row_bytes + lead;
  for (int64_t first = 0, end; first < q.columns; first = end) {
    end = std::min(first + blocks.size, q.columns);
    const Columns columns(q, first, end - first);
    const auto formats = side_by_side<kSide>(
        [&](int r) __attribute__((always_inline)) { return Format(q, at[static_cast<size_t>(r)], columns); });
    bool bounded = true;
    for (const Format& format : formats) bounded = bounded && format.bounded;
    __m512 sum[kSums];
#pragma GCC unroll 16
    for (auto& lane : sum) lane = _mm512_setzero_ps();
    const char* const token = x + first / 32 * kTokens * P::kLineBytes;
    if (bounded) {
      const char* const ahead = first == 0 ? codes : codes + kSide * q.row_bytes * first / q.columns;
      add_lines<P, Format, kTokens, kSide>(q, formats, columns, token, ahead, sum);
    } else {
      add_singly<P, kTokens, kSide>(q, at, first, end, token, sum);
    }
    float result[kSums];
#pragma GCC unroll 2
    for (int i = 0; i < kSums; i += 8) {
      __m512 eight[8];
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) eight[j] = sum[i + j];
      _mm256_storeu_ps(result + i, across(eight));
    }
    for (int64_t c = 0; c < tokens; ++c)
      for (int64_t r = 0; r < rows; ++r) sums[c * stride + r] += result[kSide * c + r];
  }
}

constexpr int64_t kTogether = 8;  // rows

// The words of `rows` rows (at most kTogether) of GPTQ, `count` each, as rows of words.
void turn_words(const Quantized& q, int64_t row, int64_t rows, int64_t first_word, int64_t count,
                uint8_t (*to)[kMostColumns + 32]) {
  const __m256i lanes =
      _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(rows)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  const uint8_t* const from = q.codes + 4 * row;
  for (int64_t j = 0; j < count; j += 8) {
    __m256i a[8], b[8], c[8];
    for (int64_t i = 0; i < 8; ++i) {
      const auto* const line = reinterpret_cast<const int*>(from + 4 * (first_word + j + i) * q.rows);
      a[i] = j + i < count ? _mm256_maskload_epi32(line, lanes) : _mm256_setzero_si256();
    }
    for (int i = 0; i < 8; i += 2) {
      b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]), b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      c[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]), c[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
      c[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]), c[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to[i] + 4 * j), _mm256_permute2x128_si256(c[i], c[4 + i], 0x20));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to[4 + i] + 4 * j),
                          _mm256_permute2x128_si256(c[i], c[4 + i], 0x31));
    }
  }
}

// Whether the columns of each step of kUnpackStep share their group.
bool in_steps(const Quantized& q, int64_t first, int64_t size) {
  if (q.order == nullptr) return true;
  for (int64_t k = first; k < first + size; k += kUnpackStep)
    for (int64_t i = 1; i < kUnpackStep; ++i)
      if (q.order[k + i] != q.order[k]) return false;
  return true;
}

template <class P, class Format, int kBits>
void unpack_gptq(const Quantized& q, int64_t row, int64_t rows, int64_t first, int64_t size, int64_t lead, void* to,
                 int64_t to_bytes) {
  const int64_t aligned = size / kUnpackStep * kUnpackStep;
  if (!in_steps(q, first, aligned)) return unpack_singly<P>(q, row, rows, first, size, lead, to, to_bytes);
  for (int64_t r = 0; r < rows; r += kTogether) {
    const int64_t some = std::min(kTogether, rows - r);
    uint8_t words[kTogether][kMostColumns + 32];
    turn_words(q, row + r, some, first * kBits / 32, aligned * kBits / 32, words);
    for (int64_t i = 0; i < some; ++i) {
      char* out = static_cast<char*>(to) + (r + i) * to_bytes;
      for (int64_t k = first, stop; k < first + aligned; k = stop) {
        const int64_t group = group_of(q, k);
        stop = q.order != nullptr ? k + kUnpackStep : q.groups == 1 ? first + aligned : (group + 1) * q.group;
        stop = std::min(first + aligned, stop);
        const typename Format::Run run(words[i] + (k - first) * kBits / 8,
                                       formats::Gptq<kBits>::line(q, row + r + i, group));
        for (int line = 0; line < (stop - k) / kUnpackStep; ++line) P::store(out, run.line(line)), out += P::kLineBytes;
      }
      if (aligned < size) unpack_singly<P>(q, row + r + i, 1, first + aligned, size - aligned, 0, out, 0);
    }
  }
}

// Rows that share the word of each column: thirty-two columns' words, the even ones and the odd ones, give every row
// its indices by a rotation.
template <class P>
void unpack_awq_word(const Quantized& q, int64_t row, int64_t rows, int64_t first, int64_t size, char* to,
                     int64_t to_bytes) {
  const auto words = static_cast<int>(q.rows / 8);
  const __m512i lines = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i even = _mm512_mullo_epi32(lines, _mm512_set1_epi32(words));
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(words));
  for (int64_t k = first, end = first + size; k < end;) {
    const int64_t group = k / q.group, stop = q.groups == 1 ? end : std::min(end, (group + 1) * q.group);
    __m512i tables[8];
    for (int64_t r = 0; r < rows; ++r) tables[r] = twice(numbers_of(formats::Awq::line(q, row + r, group)));
    for (; k < stop; k += kUnpackStep) {
      const uint8_t* const from = q.codes + 4 * (k * words + row / 8);
      const __m512i a = _mm512_i32gather_epi32(even, from, 4), b = _mm512_i32gather_epi32(odd, from, 4);
      for (int64_t r = 0; r < rows; ++r) {
        const int shift = 4 * kAwqPlaces[(row + r) % 8];
        const __m512i low = _mm512_rorv_epi32(a, _mm512_set1_epi32(shift));
        const __m512i high = _mm512_rorv_epi32(b, _mm512_set1_epi32((shift + 16) % 32));
        const __m512i index = _mm512_mask_blend_epi16(0xaaaaaaaa, low, high);
        P::store(to + r * to_bytes + (k - first) / 32 * P::kLineBytes, P::of(look_up(index, tables[r])));
      }
    }
  }
}

template <class P>
void unpack_awq(const Quantized& q, int64_t row, int64_t rows, int64_t first, int64_t size, int64_t, void* to,
                int64_t to_bytes) {
  const int64_t aligned = size / kUnpackStep * kUnpackStep;
  for (int64_t r = 0, some; r < rows; r += some) {
    some = std::min(rows - r, 8 - (row + r) % 8);
    char* const out = static_cast<char*>(to) + r * to_bytes;
    unpack_awq_word<P>(q, row + r, some, first, aligned, out, to_bytes);
    for (int64_t i = 0; aligned < size && i < some; ++i)
      unpack_singly<P>(q, row + r + i, 1, first + aligned, size - aligned, 0,
                       out + i * to_bytes + aligned / 32 * P::kLineBytes, 0);
  }
}

template <class P, class Format>
constexpr Unpacking kRows = {unpack_rows<P, Format>, sum_rows<P, Format, 1>, sum_rows<P, Format, 2>,
                             sum_rows<P, Format, 4>};

// What a format offers: unpack(like) for matrices whose groups of columns are whole steps.
template <class P, class Row>
struct Unpackers {
  static Unpacking unpack(const Quantized&) { return {unpack_singly<P>}; }
};

#if defined(__AVX512VBMI__)
template <class P, bool kSigned>
Unpacking unpacking_of_bytes(const Quantized& like) {
  return NarrowBytes<P, kSigned>::serves(like) ? kRows<P, NarrowBytes<P, kSigned>> : kRows<P, Bytes<P, kSigned>>;
}
#else
template <class P, bool kSigned>
Unpacking unpacking_of_bytes(const Quantized&) {
  return kRows<P, Bytes<P, kSigned>>;
}
#endif

template <class P>
struct Unpackers<P, formats::Fp8> {
  static Unpacking unpack(const Quantized&) { return kRows<P, Fp8<P>>; }
};
template <class P>
struct Unpackers<P, formats::Int8> {
  static Unpacking unpack(const Quantized& like) { return unpacking_of_bytes<P, true>(like); }
};
template <class P>
struct Unpackers<P, formats::Packed<8>> {
  static Unpacking unpack(const Quantized& like) { return unpacking_of_bytes<P, false>(like); }
};
template <class P>
struct Unpackers<P, formats::Packed<4>> {
  static Unpacking unpack(const Quantized&) { return kRows<P, Nibbles<P>>; }
};
template <class P>
struct Unpackers<P, formats::Gptq<4>> {
  static Unpacking unpack(const Quantized&) { return {unpack_gptq<P, Nibbles<P>, 4>}; }
};
template <class P>
struct Unpackers<P, formats::Gptq<8>> {
  static Unpacking unpack(const Quantized&) { return {unpack_gptq<P, UnsignedBytes<P>, 8>}; }
};
template <class P>
struct Unpackers<P, formats::Awq> {
  static Unpacking unpack(const Quantized&) { return {unpack_awq<P>}; }
};
template <class P>
struct Unpackers<P, formats::Mxfp4> {
  static Unpacking unpack(const Quantized&) { return kRows<P, Mx<P>>; }
};

template <class P, class Row>
struct SmallUnpackers {
  static Unpacking unpack(const Quantized&) { return kRows<P, SmallBlocks<P, Row>>; }
};
template <class P>
struct Unpackers<P, formats::Q4_0> : SmallUnpackers<P, formats::Q4_0> {};
template <class P>
struct Unpackers<P, formats::Q4_1> : SmallUnpackers<P, formats::Q4_1> {};
template <class P>
struct Unpackers<P, formats::Q5_0> : SmallUnpackers<P, formats::Q5_0> {};
template <class P>
struct Unpackers<P, formats::Q5_1> : SmallUnpackers<P, formats::Q5_1> {};
template <class P>
struct Unpackers<P, formats::Q8_0> : SmallUnpackers<P, formats::Q8_0> {};
template <class P>
struct Unpackers<P, formats::Iq4Nl> : SmallUnpackers<P, formats::Iq4Nl> {};
template <class P>
struct Unpackers<P, formats::Mxfp4Blocks> : SmallUnpackers<P, formats::Mxfp4Blocks> {};

template <class P, class Row, template <class> class Block>
struct LargeUnpackers {
  static Unpacking unpack(const Quantized&) { return kRows<P, LargeBlocks<P, Block, Row>>; }
};
template <class P>
struct Unpackers<P, formats::Q2K> : LargeUnpackers<P, formats::Q2K, Q2Block> {};
template <class P>
struct Unpackers<P, formats::Q3K> : LargeUnpackers<P, formats::Q3K, Q3Block> {};
template <class P>
struct Unpackers<P, formats::Q4K> : LargeUnpackers<P, formats::Q4K, Q4Block> {};
template <class P>
struct Unpackers<P, formats::Q5K> : LargeUnpackers<P, formats::Q5K, Q5Block> {};
template <class P>
struct Unpackers<P, formats::Q6K> : LargeUnpackers<P, formats::Q6K, Q6Block> {};
template <class P>
struct Unpackers<P, formats::Iq4Xs> : LargeUnpackers<P, formats::Iq4Xs, Iq4Block> {};

template <class P>
Unpacking unpacking_of(const Quantized& like) {
  const bool even = like.groups == 1 || like.group % kUnpackStep == 0;
  return with_format(like, [&](auto format) -> Unpacking {
    using Row = decltype(format);
    return kInBlocks<Row> || even ? Unpackers<P, Row>::unpack(like) : Unpacking{unpack_singly<P>};
  });
}

}  // namespace
}  // namespace moelight
