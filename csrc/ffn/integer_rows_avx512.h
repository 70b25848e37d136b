// Products of one to four int8 tokens with rows of codes as they are stored, for AVX-512 with VNNI. Internal linkage.
//
// With few tokens filling panels takes longer than their products. Here lanes go along the columns: codes of four rows
// meet the tokens' lines as they are unpacked, and whole sums are added across lanes at the end of a group. Sums of
// whole numbers are exact in any order, and floats are added group by group as integers.inl does: the results are the
// same to the bit.
//
// A format is a class over the four rows:
//   kChunk, kLines    columns whose codes are read together, as kLines vectors in the order of arrange()
//   kChunks           of them in a stage, which has kStageGroups groups
//   kParted           parts of a group have steps, which weigh the products of words
//   kMaxTokens        with more of them panels are filled in less time than whole sums take to cross lanes; those of
//                     parts cross once a block
//   at(r, k)          where the bytes of column k of row r are, kBytes of a chunk
//   codes(r, k, to)   those of row r from column k on; nothing is read behind the row
//   floats(k, left)   scales of the stage's groups of four rows, of which `left` are there
#pragma once

#include "integers_avx512_vnni.h"

namespace moelight {
namespace {

constexpr int kSideRows = 4;
constexpr int64_t kStageGroups = 4;
constexpr int64_t kStoredLead = 8 << 10;   // bytes ahead that memory is asked for
constexpr int64_t kLinesBytes = 28 << 10;  // of tokens

// The sums of each quarter of four vectors, those of a quarter beside each other.
inline __m512i across_quarters(__m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}
// Sums of the neighbouring quarters of a, then of b.
inline __m512i halved(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}
// Word j of quarter i to word i of quarter j.
inline __m512i turned_quarters(__m512i x) {
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), x);
}
// At most four words from p on, each in all of its quarter.
inline __m512i spread_quarters(const void* p, int64_t count) {
  const __m128i some = _mm_maskz_loadu_epi32(static_cast<__mmask8>((1u << count) - 1), p);
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
                                  _mm512_castsi128_si512(some));
}
inline __m512i four_quarters(__m128i a, __m128i b, __m128i c, __m128i d) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_set_m128i(b, a)), _mm256_set_m128i(d, c), 1);
}

// Of four groups, a quarter each, of four rows.
struct StageFloats {
  __m512 scale = _mm512_setzero_ps(), least = _mm512_setzero_ps();
  __m512i zero = _mm512_setzero_si512();
};

// ---------------------------------------------------------------------------------------------------------------------

// How numbers of a token, sixty-four a line, lie for the codes' vectors: two lines at a time.
enum class LineOrder { kPlain, kEvenOdd, kQuarters, kHalves };

// Where the four rows are; a last one stands for those that are missing.
struct SideRows {
  static constexpr int64_t kMaxTokens = 2;
  const Quantized& q;
  int64_t row[kSideRows];
  const uint8_t* line[kSideRows];
  SideRows(const Quantized& q, int64_t first, int64_t count) : q(q) {
    for (int64_t r = 0; r < kSideRows; ++r) {
      row[r] = first + std::min(r, count - 1);
      line[r] = q.codes + row[r] * q.row_bytes;
    }
  }
  // float16 at byte `at` of four blocks of `bytes` from the block-th on; absent ones are as the last.
  __m512 halves(int64_t block, int64_t bytes, int64_t at, int64_t left) const {
    alignas(32) uint16_t halves[16];
    for (int64_t b = 0; b < kStageGroups; ++b)
      for (int64_t r = 0; r < kSideRows; ++r)
        std::memcpy(halves + 4 * b + r, line[r] + (block + std::min(b, left - 1)) * bytes + at, 2);
    return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(halves)));
  }
};

// Rows of codes with groups of columns: scales and zero points lie by themselves.
template <class Format, int64_t kGroup>
struct GroupedRows : SideRows {
  static constexpr bool kParted = false, kLeast = false;
  static constexpr bool kWordsOfNibbles = std::is_same_v<Format, formats::Packed<4>>;
  IntegerForm form;
  bool shared, by_groups, by_words;
  StageFloats row_floats = {};  // of rows that are one group

  GroupedRows(const Quantized& q, const IntegerForm& form, int64_t first, int64_t count)
      : SideRows(q, first, count),
        form(form),
        shared(q.groups == 1),
        by_groups(kE2m1<Format> ||
                  (q.group == kGroup && (Format::kTraits.scales == Scales::kByRows || q.group_rows == 1))),
        by_words(kWordsOfNibbles && first % kSideRows == 0 && count == kSideRows) {
    if (shared) row_floats = plain(0, 1, true);
  }
  StageFloats floats(int64_t k, int64_t left) const {
    if (shared) return row_floats;
    if (!by_groups || (form.zero < 0 && !by_words)) return plain(k, left, false);
    StageFloats result = {};
    const int64_t group = k / kGroup;
    const auto some = static_cast<__mmask16>((1u << left) - 1);
    __m128 scales[kSideRows];
    for (int64_t r = 0; r < kSideRows; ++r) {
      const int64_t at = row[r] * q.groups + group;
      scales[r] = _mm512_castps512_ps128(kE2m1<Format> ? half_powers16(static_cast<const uint8_t*>(q.scales) + at, some)
                                                       : scales16(q, at, some));
    }
    const auto words = [&](int r) { return _mm_castps_si128(scales[r]); };
    result.scale = _mm512_castsi512_ps(turned_quarters(four_quarters(words(0), words(1), words(2), words(3))));
    if (form.zero >= 0) return result;
    const int shift = static_cast<int>(4 * (row[0] % 8));
    const __m512i places = _mm512_broadcast_i32x4(_mm_setr_epi32(shift, shift + 4, shift + 8, shift + 12));
    const __m512i zeros = spread_quarters(q.zeros + 4 * (row[0] / 8 * q.groups + group), left);
    result.zero = _mm512_and_si512(_mm512_srlv_epi32(zeros, places), _mm512_set1_epi32(15));
    return result;
  }

 private:
  StageFloats plain(int64_t k, int64_t left, bool alike) const {
    alignas(64) float scale[16] = {};
    alignas(64) int32_t zero[16] = {};
    for (int64_t g = 0; g < (alike ? kStageGroups : left); ++g) {
      for (int64_t r = 0; r < kSideRows; ++r) {
        const IntegerLine by = Format::integer_line(q, row[r], alike ? 0 : k + g * kGroup);
        scale[4 * g + r] = by.scale, zero[4 * g + r] = by.zero;
      }
    }
    return {.scale = _mm512_load_ps(scale), .zero = _mm512_load_si512(zero)};
  }
};

// Sixty-four bytes, or as many as are left.
inline __m512i load_left(const uint8_t* p, int64_t left) {
  if (left >= 64) return load64(p);
  return left <= 0 ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi8((__mmask64{1} << left) - 1, p);
}

template <class Format, int64_t kGroup>
struct NibbleRows : GroupedRows<Format, kGroup> {
  using GroupedRows<Format, kGroup>::GroupedRows;
  static constexpr LineOrder kOrder = LineOrder::kEvenOdd;
  static constexpr int64_t kChunk = 128, kBytes = 64;
  static constexpr int kLines = 2, kChunks = kGroup / 32;
  const uint8_t* at(int r, int64_t k) const { return this->line[r] + k / 2; }
  void codes(int r, int64_t k, __m512i (&to)[kLines]) const {
    const __m512i packed = load_left(at(r, k), this->q.row_bytes - k / 2);
    const __m512i low = low_halves(packed), high = high_halves(packed);
    to[0] = kE2m1<Format> ? e2m1_codes(low) : low, to[1] = kE2m1<Format> ? e2m1_codes(high) : high;
  }
};

template <class Format, int64_t kGroup>
struct ByteRows : GroupedRows<Format, kGroup> {
  using GroupedRows<Format, kGroup>::GroupedRows;
  static constexpr LineOrder kOrder = LineOrder::kPlain;
  static constexpr bool kSigned = std::is_same_v<Format, formats::Int8>;
  static constexpr int64_t kChunk = kGroup < 64 ? 64 : kGroup, kBytes = kChunk;
  static constexpr int kLines = kChunk / 64, kChunks = kGroup < 64 ? 2 : 4;
  const uint8_t* at(int r, int64_t k) const { return this->line[r] + k; }
  void codes(int r, int64_t k, __m512i (&to)[kLines]) const {
#pragma GCC unroll 2
    for (int i = 0; i < kLines; ++i) {
      const __m512i bytes = load_left(at(r, k) + 64 * i, this->q.row_bytes - k - 64 * i);
      to[i] = kSigned ? unsigned_bytes(bytes) : bytes;
    }
  }
};

// ggml's blocks of 32.
template <class Format>
struct BlockRows : SideRows {
  static constexpr bool kParted = false, kLeast = Format::kLeast, kWide = std::is_same_v<Format, formats::Q8_0>;
  static constexpr bool kFive = std::is_same_v<Format, formats::Q5_0> || std::is_same_v<Format, formats::Q5_1>;
  static constexpr LineOrder kOrder = kWide ? LineOrder::kPlain : LineOrder::kQuarters;
  static constexpr int64_t kBlock = Format::kTraits.block_bytes, kHead = kBlock - (kWide ? 32 : 16);
  static constexpr int64_t kChunk = kWide ? 64 : 128, kBytes = kChunk / 32 * kBlock;
  static constexpr int kLines = kWide ? 1 : 2, kChunks = kWide ? 2 : 1;

  BlockRows(const Quantized& q, const IntegerForm&, int64_t first, int64_t count) : SideRows(q, first, count) {}
  const uint8_t* at(int r, int64_t k) const { return line[r] + k / 32 * kBlock; }
  void codes(int r, int64_t k, __m512i (&to)[kLines]) const {
    const uint8_t* const from = at(r, k) + kHead;
    const int64_t left = (q.columns - k) / 32;
    if constexpr (kWide) {
      const __m512i low = _mm512_castsi256_si512(bytes32(from));
      to[0] = unsigned_bytes(left < 2 ? low : _mm512_inserti64x4(low, bytes32(from + kBlock), 1));
    } else {
      const auto block = [&](int64_t i) { return i < left ? bytes16(from + i * kBlock) : _mm_setzero_si128(); };
      const __m512i packed = four_quarters(block(0), block(1), block(2), block(3));
      const __m512i low = low_halves(packed), high = high_halves(packed);
      to[0] = kE2m1<Format> ? e2m1_codes(low) : low, to[1] = kE2m1<Format> ? e2m1_codes(high) : high;
    }
    if constexpr (kFive) {
      uint64_t bits[2] = {0, 0};
      for (int64_t i = 0; i < std::min<int64_t>(left, 4); ++i) {
        const uint64_t word = word_at(from + i * kBlock - 4, 0);
        bits[0] |= (word & 0xffff) << (16 * i), bits[1] |= (word >> 16) << (16 * i);
      }
      for (int i = 0; i < kLines; ++i) to[i] = _mm512_or_si512(to[i], _mm512_maskz_set1_epi8(bits[i], 16));
    }
  }
  StageFloats floats(int64_t k, int64_t left) const {
    if constexpr (kLeast) {
      const __m512i sign = _mm512_set1_epi32(static_cast<int>(0x80000000));
      const __m512i words = heads(k, left), least = _mm512_castps_si512(halves16(_mm512_srli_epi32(words, 16)));
      return {.scale = halves16(words), .least = _mm512_castsi512_ps(_mm512_xor_si512(least, sign))};
    }
    if constexpr (!kE2m1<Format>) return {.scale = halves(k / 32, kBlock, 0, left)};
    alignas(16) uint8_t powers[16];
    for (int64_t b = 0; b < kStageGroups; ++b)
      for (int64_t r = 0; r < kSideRows; ++r)
        powers[4 * b + r] = *at(static_cast<int>(r), k + 32 * std::min(b, left - 1));
    return {.scale = half_powers16(powers, 0xffff)};
  }

 private:
  // The first four bytes of blocks.
  __m512i heads(int64_t k, int64_t left) const {
    alignas(64) uint32_t words[16];
    for (int64_t b = 0; b < kStageGroups; ++b)
      for (int r = 0; r < kSideRows; ++r) std::memcpy(words + 4 * b + r, at(r, k + 32 * std::min(b, left - 1)), 4);
    return _mm512_load_si512(words);
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// ggml's blocks of 256, whose parts have steps.

// Words of sixty-four codes each: byte `low` of every quarter's sixteen for the lower half, byte `high` for the upper.
inline __m512i bytes_as_words(__m512i bytes, int low, int high) {
  const __m512i places = _mm512_inserti64x4(_mm512_set1_epi16(static_cast<int16_t>(0x8000 | low)),
                                            _mm256_set1_epi16(static_cast<int16_t>(0x8000 | high)), 1);
  return _mm512_shuffle_epi8(bytes, places);
}

// Eight steps of a row's block and eight that are subtracted (KScales), by its first sixteen bytes.
inline __m128i k_parts(__m128i head) {
  // By words: the bits of lower parts, and the upper bits of the others.
  const __m128i lower = _mm_srlv_epi32(_mm_shuffle_epi32(head, 0xed), _mm_setr_epi32(0, 0, 0, 4));
  const __m128i upper = _mm_srli_epi32(_mm_shuffle_epi32(head, 0x84), 2);
  return _mm_or_si128(_mm_and_si128(lower, _mm_setr_epi32(0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f)),
                      _mm_and_si128(upper, _mm_setr_epi32(0, 0x30303030, 0, 0x30303030)));
}

template <bool kFive>
struct KRows : SideRows {
  static constexpr bool kParted = true, kLeast = true;
  static constexpr LineOrder kOrder = LineOrder::kHalves;
  static constexpr int64_t kMaxTokens = kFive ? 4 : 2;
  static constexpr int64_t kChunk = 256, kBlock = kFive ? 176 : 144, kCodes = kFive ? 48 : 16, kBytes = kBlock;
  static constexpr int kLines = 4, kChunks = 4;

  KRows(const Quantized& q, const IntegerForm&, int64_t first, int64_t count) : SideRows(q, first, count) {}
  const uint8_t* at(int r, int64_t k) const { return line[r] + k / 256 * kBlock; }
  void codes(int r, int64_t k, __m512i (&to)[kLines], __m512i (&steps)[kLines]) const {
    const uint8_t* const from = at(r, k);
    const __m512i parts = _mm512_broadcast_i32x4(k_parts(bytes16(from)));
    steps[0] = bytes_as_words(parts, 0, 2), steps[1] = bytes_as_words(parts, 1, 3);
    steps[2] = bytes_as_words(parts, 4, 6), steps[3] = bytes_as_words(parts, 5, 7);
    __m512i fifth = _mm512_setzero_si512();
    if constexpr (kFive) fifth = _mm512_broadcast_i64x4(bytes32(from + 16));
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m512i packed = load64(from + kCodes + 64 * half);
      to[2 * half] = low_halves(packed), to[2 * half + 1] = high_halves(packed);
      if constexpr (kFive) {
        // Bit `part` of each byte to its bit 4.
        const auto above = [&](int part) {
          const __m512i by = _mm512_inserti64x4(_mm512_set1_epi32(36 - part), _mm256_set1_epi32(34 - part), 1);
          return _mm512_and_si512(_mm512_rolv_epi32(fifth, by), _mm512_set1_epi8(16));
        };
        to[2 * half] = _mm512_or_si512(to[2 * half], above(4 * half));
        to[2 * half + 1] = _mm512_or_si512(to[2 * half + 1], above(4 * half + 1));
      }
    }
  }
  __m512i start(int, int64_t, const char*) const { return _mm512_setzero_si512(); }
  // What is subtracted times the sums of the parts' numbers, in four words.
  __m128i low(int r, int64_t k, const char* sums) const {
    const __m128i lows = _mm_unpackhi_epi8(k_parts(bytes16(at(r, k))), _mm_setzero_si128());
    return _mm_madd_epi16(lows, bytes16(sums + 2 * (k / 32)));
  }
  StageFloats floats(int64_t k, int64_t left) const {
    alignas(64) uint32_t heads[16];
    for (int64_t b = 0; b < kStageGroups; ++b)
      for (int r = 0; r < kSideRows; ++r) std::memcpy(heads + 4 * b + r, at(r, k + 256 * std::min(b, left - 1)), 4);
    const __m512i words = _mm512_load_si512(heads);
    return {.scale = halves16(words), .least = halves16(_mm512_srli_epi32(words, 16))};
  }
};

struct K6Rows : SideRows {
  static constexpr bool kParted = true, kLeast = false;
  static constexpr LineOrder kOrder = LineOrder::kPlain;
  static constexpr int64_t kMaxTokens = 4;
  static constexpr int64_t kChunk = 256, kBlock = 210, kBytes = kBlock;
  static constexpr int kLines = 4, kChunks = 4;

  K6Rows(const Quantized& q, const IntegerForm&, int64_t first, int64_t count) : SideRows(q, first, count) {}
  const uint8_t* at(int r, int64_t k) const { return line[r] + k / 256 * kBlock; }
  void codes(int r, int64_t k, __m512i (&to)[kLines], __m512i (&steps)[kLines]) const {
    const uint8_t* const from = at(r, k);
    const __m512i parts = _mm512_castsi256_si512(_mm256_cvtepi8_epi16(bytes16(from + 192)));
    const __m512i quarters = _mm512_setr_epi32(0, 0, 0, 0, 0x10001, 0x10001, 0x10001, 0x10001, 0x20002, 0x20002,
                                               0x20002, 0x20002, 0x30003, 0x30003, 0x30003, 0x30003);
#pragma GCC unroll 4
    for (int i = 0; i < kLines; ++i)
      steps[i] =
          _mm512_permutexvar_epi16(_mm512_add_epi16(quarters, _mm512_set1_epi16(static_cast<int16_t>(4 * i))), parts);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m512i packed = load64(from + 64 * half);
      const __m512i bits = _mm512_broadcast_i64x4(bytes32(from + 128 + 32 * half));
      const __m512i two = _mm512_srlv_epi32(bits, _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2));
      const __m512i upper = _mm512_set1_epi8(48);
      to[2 * half] = _mm512_or_si512(low_halves(packed), _mm512_and_si512(_mm512_slli_epi32(two, 4), upper));
      to[2 * half + 1] = _mm512_or_si512(high_halves(packed), _mm512_and_si512(two, upper));
    }
  }
  // What codes are too large by: 32 times the steps times the parts' sums, which are given as -32 times those.
  __m512i start(int r, int64_t k, const char* sums) const {
    const __m256i minus = _mm512_cvtepi32_epi16(_mm512_srai_epi32(load64(sums + 4 * (k / 16)), 5));
    const __m256i parts = _mm256_cvtepi8_epi16(bytes16(at(r, k) + 192));
    return _mm512_zextsi256_si512(_mm256_slli_epi32(_mm256_madd_epi16(parts, minus), 5));
  }
  StageFloats floats(int64_t k, int64_t left) const { return {.scale = halves(k / 256, kBlock, 208, left)}; }
};

// ---------------------------------------------------------------------------------------------------------------------

template <LineOrder kOrder>
void pair_of_lines(__m512i a, __m512i b, __m512i& first, __m512i& second) {
  switch (kOrder) {
    case LineOrder::kPlain:
      first = a, second = b;
      break;
    case LineOrder::kEvenOdd: {  // fours of even columns, then of odd ones (IntegerForm::pairs)
      const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
      first = _mm512_permutex2var_epi32(a, even, b);
      second = _mm512_permutex2var_epi32(a, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b);
      break;
    }
    case LineOrder::kQuarters:
      first = _mm512_shuffle_i32x4(a, b, 0x88), second = _mm512_shuffle_i32x4(a, b, 0xdd);
      break;
    case LineOrder::kHalves:
      first = _mm512_shuffle_i32x4(a, b, 0x44), second = _mm512_shuffle_i32x4(a, b, 0xee);
      break;
  }
}

// Line k of all tokens, then line k + 1; of a token that is not there, the last one's.
template <LineOrder kOrder>
void arrange(const Product& p, int64_t columns, int64_t count, char* to) {
  const auto load = [&](int64_t c, int64_t k) {
    const int64_t left = columns - k;
    const char* const at = p.x + std::min(c, p.tokens - 1) * p.x_bytes + k;
    if (left >= 64) return load64(at);
    return left <= 0 ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi8((__mmask64{1} << left) - 1, at);
  };
  for (int64_t k = 0; k < columns; k += 128, to += 128 * count) {
    for (int64_t c = 0; c < count; ++c) {
      __m512i first, second;
      pair_of_lines<kOrder>(load(c, k), load(c, k + 64), first, second);
      _mm512_store_si512(to + 64 * c, first), _mm512_store_si512(to + 64 * (count + c), second);
    }
  }
}

// What all rows of a product share.
struct StoredProduct {
  const Product& p;
  IntegerForm form;
  IntegerTokens layout;
  const char* lines;
  const char* token(int c) const { return p.x + std::min<int64_t>(c, p.tokens - 1) * p.x_bytes; }
};

// Of four rows, by chunks of columns and then by tokens.
struct RowSums {
  static constexpr int64_t kMaxChunks = 64;
  alignas(64) __m512i full[kMaxChunks][kSideRows];
  alignas(64) __m128i low[kMaxChunks][kSideRows];
};

// The sums of one row from column `first` to `end`, chunk by chunk, fetching what lies `lead` bytes ahead: the row is
// read from end to end, which is what the processor fetches ahead best.
template <class F, int kTokens>
inline __attribute__((always_inline)) void one_row(const StoredProduct& of, const F& rows, int r, int64_t first,
                                                   int64_t end, int64_t lead, RowSums& to) {
  const char* lines = of.lines + first * kTokens;
  for (int64_t k = first, i = 0; k < end; k += F::kChunk, i += kTokens, lines += F::kChunk * kTokens) {
    __m512i codes[F::kLines], steps[F::kLines], sum[kTokens];
    const char* const ahead = reinterpret_cast<const char*>(rows.at(r, k)) + lead;
#pragma GCC unroll 4
    for (int64_t byte = 0; byte < F::kBytes; byte += 64) _mm_prefetch(ahead + byte, _MM_HINT_T1);
    if constexpr (F::kParted) {
      rows.codes(r, k, codes, steps);
    } else {
      rows.codes(r, k, codes);
    }
#pragma GCC unroll 4
    for (int c = 0; c < kTokens; ++c) {
      sum[c] = _mm512_setzero_si512();
      if constexpr (F::kParted) sum[c] = rows.start(r, k, of.token(c) + of.layout.sums());
    }
#pragma GCC unroll 4
    for (int l = 0; l < F::kLines; ++l) {
#pragma GCC unroll 4
      for (int c = 0; c < kTokens; ++c) {
        const __m512i values = _mm512_load_si512(lines + 64 * (l * kTokens + c));
        if constexpr (F::kParted) {
          sum[c] = dot_words(sum[c], _mm512_maddubs_epi16(codes[l], values), steps[l]);
        } else {
          sum[c] = dot_bytes(sum[c], codes[l], values);
        }
      }
    }
#pragma GCC unroll 4
    for (int c = 0; c < kTokens; ++c) {
      to.full[i + c][r] = sum[c];
      if constexpr (F::kParted && F::kLeast) to.low[i + c][r] = rows.low(r, k, of.token(c) + of.layout.sums());
    }
  }
}

template <int kChunks>
inline __m512i stage_sums(const __m512i (&of)[kChunks]) {
  if constexpr (kChunks == 1) return of[0];
  if constexpr (kChunks == 2) return halved(of[0], of[1]);
  if constexpr (kChunks == 4) return halved(halved(of[0], of[1]), halved(of[2], of[3]));
}

// Adds the sums of four rows, a word each of which the groups from column k on are the quarters.
template <class F>
inline __m128 add_groups(const StoredProduct& of, const char* x, int64_t k, int64_t left, const StageFloats& by,
                         __m512i full, __m512i low, __m128 sums) {
  using S = Unfused<Avx512>;
  const int64_t group = k / of.form.group;
  if constexpr (!F::kParted && !F::kLeast) {
    const __m512i minus = spread_quarters(x + of.layout.sums() + 4 * group, left);
    full = _mm512_add_epi32(full, of.form.zero >= 0 ? minus : _mm512_mullo_epi32(by.zero, minus));
  }
  if constexpr (!F::kParted && F::kLeast) {
    const __m128i sums_of_four = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(x + of.layout.sums() + 2 * group));
    alignas(16) int32_t words[4];
    _mm_store_si128(reinterpret_cast<__m128i*>(words), _mm_cvtepi16_epi32(sums_of_four));
    low = spread_quarters(words, left);
  }
  __m512 value = S::mul(_mm512_cvtepi32_ps(full), by.scale);
  if constexpr (F::kLeast) value = S::sub(value, S::mul(_mm512_cvtepi32_ps(low), by.least));
  value = S::mul(value, _mm512_castsi512_ps(spread_quarters(x + of.layout.scales() + 4 * group, left)));
  sums = _mm_add_ps(sums, _mm512_castps512_ps128(value));
  if (left > 1) sums = _mm_add_ps(sums, _mm512_extractf32x4_ps(value, 1));
  if (left > 2) sums = _mm_add_ps(sums, _mm512_extractf32x4_ps(value, 2));
  if (left > 3) sums = _mm_add_ps(sums, _mm512_extractf32x4_ps(value, 3));
  return sums;
}

template <class F, int kTokens>
void four_rows(const StoredProduct& of, int64_t row, RowSums& row_sums, float* to) {
  constexpr int kChunks = F::kChunks;
  constexpr int64_t kStage = kChunks * F::kChunk, kColumns = RowSums::kMaxChunks / kTokens * F::kChunk;
  static_assert(kColumns % kStage == 0);
  const Product& p = of.p;
  const F rows(*p.quantized, of.form, p.first_row + row, std::min<int64_t>(kSideRows, p.rows - row));
  const int64_t bytes = kSideRows * p.row_bytes;
  const int64_t later = kSideRows * ((kStoredLead + bytes - 1) / bytes), lead = p.lead_of(row, later);
  p.fetch_scales(row, later, kSideRows);
  __m128 sums[kTokens];
  for (int c = 0; c < kTokens; ++c) sums[c] = _mm_loadu_ps(to + std::min<int64_t>(c, p.tokens - 1) * kUnitRows);
  for (int64_t first = 0, end; first < p.depth; first = end) {
    end = std::min(first + kColumns, p.depth);
    for (int r = 0; r < kSideRows; ++r) one_row<F, kTokens>(of, rows, r, first, end, lead, row_sums);
    for (int64_t k = first, at = 0; k < end; k += kStage, at += kChunks * kTokens) {
      const int64_t left = std::min(kStageGroups, (end - k + of.form.group - 1) / of.form.group);
      const int64_t chunks = std::min<int64_t>(kChunks, (end - k + F::kChunk - 1) / F::kChunk);
      const StageFloats by = rows.floats(k, left);
#pragma GCC unroll 4
      for (int c = 0; c < kTokens; ++c) {
        __m512i full[kChunks], low[kChunks];
#pragma GCC unroll 4
        for (int i = 0; i < kChunks; ++i) {
          const int64_t from =
              at + std::min<int64_t>(i, chunks - 1) * kTokens + c;  // of none that is there nobody asks
          const auto& four = row_sums.full[from];
          full[i] = across_quarters(four[0], four[1], four[2], four[3]);
          if constexpr (F::kParted && F::kLeast) low[i] = _mm512_load_si512(row_sums.low[from]);
        }
        __m512i lows = _mm512_setzero_si512();
        if constexpr (F::kParted && F::kLeast) lows = turned_quarters(across_quarters(low[0], low[1], low[2], low[3]));
        sums[c] = add_groups<F>(of, of.token(c), k, left, by, stage_sums(full), lows, sums[c]);
      }
    }
  }
  for (int c = 0; c < kTokens && c < p.tokens; ++c) _mm_storeu_ps(to + c * kUnitRows, sums[c]);
}

template <class F, int kTokens>
void stored_rows(const Product& p, const IntegerForm& form, const IntegerTokens& layout, char* scratch, float* sums) {
  arrange<F::kOrder>(p, layout.columns, kTokens, scratch);
  const StoredProduct of = {p, form, layout, scratch};
  auto& row_sums = *reinterpret_cast<RowSums*>(scratch + kLinesBytes);
  for (int64_t row = 0; row < p.rows; row += kSideRows) four_rows<F, kTokens>(of, row, row_sums, sums + row);
}

// False where the product is left to panels.
template <class F>
bool by_stored_rows(const Product& p, const IntegerForm& form, const IntegerTokens& layout, char* scratch,
                    float* sums) {
  const int64_t count = p.tokens == 3 ? 4 : p.tokens;
  if (count > F::kMaxTokens) return false;
  if (count * ((layout.columns + 127) / 128 * 128) > kLinesBytes) return false;
  if (count == 1) return stored_rows<F, 1>(p, form, layout, scratch, sums), true;
  if (count == 2) return stored_rows<F, 2>(p, form, layout, scratch, sums), true;
  if constexpr (F::kMaxTokens == 4) stored_rows<F, 4>(p, form, layout, scratch, sums);
  return true;
}

// Formats whose rows are multiplied as they are stored, by groups of kGroup columns where scales lie beside the codes.
template <class Format, int64_t kGroup>
struct StoredRows {};
template <int64_t kGroup>
  requires(kGroup <= 128)
struct StoredRows<formats::Int8, kGroup> {
  using Rows = ByteRows<formats::Int8, kGroup>;
};
template <int64_t kGroup>
  requires(kGroup <= 128)
struct StoredRows<formats::Packed<8>, kGroup> {
  using Rows = ByteRows<formats::Packed<8>, kGroup>;
};
template <int64_t kGroup>
  requires(kGroup <= 128)
struct StoredRows<formats::Packed<4>, kGroup> {
  using Rows = NibbleRows<formats::Packed<4>, kGroup>;
};
template <>
struct StoredRows<formats::Mxfp4, 32> {
  using Rows = NibbleRows<formats::Mxfp4, 32>;
};
template <>
struct StoredRows<formats::Mxfp4Blocks, 32> {
  using Rows = BlockRows<formats::Mxfp4Blocks>;
};
template <>
struct StoredRows<formats::Q4_0, 32> {
  using Rows = BlockRows<formats::Q4_0>;
};
template <>
struct StoredRows<formats::Q4_1, 32> {
  using Rows = BlockRows<formats::Q4_1>;
};
template <>
struct StoredRows<formats::Q5_0, 32> {
  using Rows = BlockRows<formats::Q5_0>;
};
template <>
struct StoredRows<formats::Q5_1, 32> {
  using Rows = BlockRows<formats::Q5_1>;
};
template <>
struct StoredRows<formats::Q8_0, 32> {
  using Rows = BlockRows<formats::Q8_0>;
};
template <>
struct StoredRows<formats::Q4K, 256> {
  using Rows = KRows<false>;
};
template <>
struct StoredRows<formats::Q5K, 256> {
  using Rows = KRows<true>;
};
template <>
struct StoredRows<formats::Q6K, 256> {
  using Rows = K6Rows;
};

template <class Format, int64_t... kGroups>
bool by_groups_of(const Product& p, const IntegerForm& form, const IntegerTokens& layout, char* scratch, float* sums) {
  bool served = false;
  const auto with = [&]<int64_t kGroup>(std::integral_constant<int64_t, kGroup>) {
    if constexpr (requires { typename StoredRows<Format, kGroup>::Rows; })
      if (form.group == kGroup)
        served = by_stored_rows<typename StoredRows<Format, kGroup>::Rows>(p, form, layout, scratch, sums);
  };
  (with(std::integral_constant<int64_t, kGroups>()), ...);
  return served;
}

inline bool multiply_stored_rows(const Product& p, const IntegerForm& form, const IntegerTokens& layout, char* scratch,
                                 float* sums) {
  if (p.weight == nullptr) return false;
  return with_format(*p.quantized, [&](auto format) -> bool {
    return by_groups_of<decltype(format), 32, 64, 128, 256>(p, form, layout, scratch, sums);
  });
}

}  // namespace
}  // namespace moelight
