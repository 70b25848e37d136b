// Rows of quantised matrices as lines of thirty-two numbers rounded to bf16, for AVX-512 with BF16. Internal linkage.
//
// Codes of up to five bits are looked up in a table of all their numbers in a group, rounded to bf16: an index is the
// lowest bits of a word or of four bytes, whatever stands above them. Wider ones go through float32. Products in
// float32 of scales and codes are exact in these formats, so that a fused subtraction rounds as one after the other
// does.
//
// A format is a class over Lanes P (ffn/pairs.h):
//   Format(matrix, row, columns)      what some columns of a row share, at most kMostColumns: scales as float32
//   run(k, group)                     what the columns from k on share, which lie in the group-th group from the first
//   run.line(i)                       the i-th thirty-two numbers of those
//   run.line_of_whole(i)              the same where all lines are asked for, if that is another way
//   codes(k)                          where the bytes of column k are
//   bounded                              whether run() may be asked: no scale is huge, infinite or no number
//   kColumns, kLineBytes              columns of a run at most, which begins at a multiple of them; bytes of a line
#pragma once

#include <immintrin.h>

#include "ffn/pairs.h"
#include "unpack.h"

namespace moelight {
namespace {

inline __m512i join(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }
inline __m512i twice(__m512 table) { return join(table, table); }
inline __m512 counting() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
inline __m512i look_up(__m512i index, __m512i table) { return _mm512_permutexvar_epi16(index, table); }
inline __m256i load32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline __m128i load16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline void fetch_from(const void* p, int64_t lead) { _mm_prefetch(static_cast<const char*>(p) + lead, _MM_HINT_T0); }

// The first words of a in `mask`, the others of b.
inline __m512i select(int mask, __m512i a, __m512i b) {
  return _mm512_ternarylogic_epi32(_mm512_set1_epi16(static_cast<int16_t>(mask)), a, b, 0xca);
}
// Indices by sixteen bytes of two codes each, first the lower bits of all.
inline __m512i by_halves(const uint8_t* p) {
  const __m256i two = _mm256_cvtepu8_epi16(load16(p));
  return _mm512_inserti64x4(_mm512_castsi256_si512(two), _mm256_srli_epi16(two, 4), 1);
}

// Rounded to bf16: the sum with 1.5 * 2^16 times its power of two has as many bits left. Bounded numbers are below
// 2^111.
inline __m512 round_tame(__m512 x) {
  const __m512i power = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(static_cast<int>(0xff800000)));
  const __m512 far = _mm512_set1_ps(98304.0f), sum = _mm512_fmadd_ps(_mm512_castsi512_ps(power), far, x);
  return _mm512_fnmadd_ps(_mm512_castsi512_ps(power), far, sum);
}
// Scales so small that products with codes are bounded.
inline bool are_bounded(__m512 scales) {
  const __m512i limit = _mm512_set1_epi32(0x60000000), sign = _mm512_set1_epi32(0x7fffffff);
  return _mm512_cmpgt_epu32_mask(_mm512_and_si512(_mm512_castps_si512(scales), sign), limit) == 0;
}
inline bool is_bounded_half(const uint8_t* p) { return (p[1] & 0x7c) != 0x7c; }

#if defined(__AVX512VBMI__)
// Of sixty-four bytes, four lines of two codes each: in words of eight bytes two of each line, which one instruction
// takes apart into four codes.
struct Quads {
  uint8_t places[64] = {};
  constexpr Quads() {
    for (int i = 0; i < 64; ++i) places[i] = static_cast<uint8_t>(i % 8 / 2 * 16 + i / 8 * 2 + i % 2);
  }
};
inline __m512i quads_of(const uint8_t* p) {
  alignas(64) static constexpr Quads kQuads;
  return _mm512_permutexvar_epi8(_mm512_load_si512(kQuads.places), _mm512_loadu_si512(p));
}
// In words of four bytes, sixteen of thirty-two as the second one, before 0x47: float32 of 2^15 and the byte.
struct FloatPlaces {
  uint8_t places[64] = {};
  constexpr FloatPlaces(int half) {
    for (int i = 0; i < 64; ++i)
      places[i] = static_cast<uint8_t>(i % 4 == 3 ? 67 : i % 4 == 1 ? 16 * half + i / 4 : 64);
  }
};
template <int kHalf>
inline __m512 bytes_in_floats(__m256i bytes) {
  alignas(64) static constexpr FloatPlaces kPlaces(kHalf);
  return _mm512_castsi512_ps(_mm512_permutex2var_epi8(_mm512_castsi256_si512(bytes), _mm512_load_si512(kPlaces.places),
                                                      _mm512_set1_epi32(0x47000000)));
}
// (byte - 128) scale of unsigned bytes, for scales of at most 15 bits: then (2^15 + 128) scale is exact, and the sum is
// rounded once.
inline __m512i narrow_numbers(__m256i bytes, __m512 scale) {
  const __m512 base = _mm512_mul_ps(scale, _mm512_set1_ps(-32896.0f));
  return join(_mm512_fmadd_ps(bytes_in_floats<0>(bytes), scale, base),
              _mm512_fmadd_ps(bytes_in_floats<1>(bytes), scale, base));
}
inline __m256i signs_turned(__m256i bytes) { return _mm256_xor_si256(bytes, _mm256_set1_epi8(-128)); }
inline __m512i quad_codes(__m512i quads, int line) {
  return _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x000c000800040000 + 0x0010001000100010 * line), quads);
}
#endif

// Sixteen numbers, rounded, and lines of them by codes of four bits.
template <class P>
struct Table;

template <>
struct Table<Pairs> {
  __m512i twice;

  explicit Table(__m512i twice) : twice(twice) {}
  explicit Table(__m512 values) : twice(moelight::twice(values)) {}
  static Table bounded(__m512 values) { return Table(values); }
  static Table exact(__m512 values) { return Table(values); }  // of numbers that need no rounding
  // By sixteen bytes of two codes each, the lower bits first; and first the lower bits of all.
  __m512i by_pairs(const uint8_t* p) const {
    const __m512i two = _mm512_cvtepu8_epi32(load16(p));
    return look_up(_mm512_or_si512(two, _mm512_slli_epi32(two, 12)), twice);
  }
  __m512i by_halves(const uint8_t* p) const { return look_up(moelight::by_halves(p), twice); }
#if defined(__AVX512VBMI__)
  __m512i by_quads(const uint8_t* p, int line) const { return look_up(quad_codes(quads_of(p), line), twice); }
#endif
  // By the bits from `shift` on of thirty-two bytes.
  __m512i by_bytes(const uint8_t* p, int shift) const {
    const __m512i bytes = _mm512_cvtepu8_epi16(load32(p));
    return look_up(shift == 0 ? bytes : _mm512_srli_epi16(bytes, 4), twice);
  }
};

template <>
struct Table<Halves> {
  __m512 values;

  Table() = default;
  explicit Table(__m512 unrounded)
      : values(
            _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(unrounded)), 16))) {
  }
  static Table bounded(__m512 unrounded) { return exact(round_tame(unrounded)); }
  static Table exact(__m512 values) {
    Table table;
    table.values = values;
    return table;
  }
  __m512 at(__m512i index) const { return _mm512_permutexvar_ps(index, values); }
  Halves::Line by_pairs(const uint8_t* p) const {
    const __m512i two = _mm512_cvtepu8_epi32(load16(p));
    return {at(two), at(_mm512_srli_epi32(two, 4))};
  }
  Halves::Line by_halves(const uint8_t* p) const {
    const __m512i lower = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4);
    const __m512i two = _mm512_cvtepu16_epi32(_mm256_broadcastsi128_si256(load16(p)));
    return {at(_mm512_srlv_epi32(two, lower)),
            at(_mm512_srlv_epi32(two, _mm512_add_epi32(lower, _mm512_set1_epi32(8))))};
  }
  Halves::Line by_bytes(const uint8_t* p, int shift) const {
    const __m512i two = _mm512_cvtepu16_epi32(load32(p));
    return {at(shift == 0 ? two : _mm512_srli_epi32(two, 4)), at(_mm512_srli_epi32(two, 8 + shift))};
  }
};

inline __m512 half_of(const uint8_t* p) {
  int16_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return _mm512_cvtph_ps(_mm256_set1_epi16(bits));
}

inline __m512 floats_of(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }
inline __m512i scaled_bytes(__m256i bytes, __m512 low, __m512 high) {
  return join(_mm512_mul_ps(floats_of(_mm256_castsi256_si128(bytes)), low),
              _mm512_mul_ps(floats_of(_mm256_extracti128_si256(bytes, 1)), high));
}

inline __m512 numbers_of(const Line& line) {
  return _mm512_mul_ps(_mm512_sub_ps(counting(), _mm512_set1_ps(line.zero)), _mm512_set1_ps(line.scale));
}

// Columns [first, first + size) of all rows: their groups are `count` from the group `begin` on. Found once for many
// rows, because divisions take longer than a line.
struct Columns {
  int64_t first, size, begin, count;

  Columns(const Quantized& q, int64_t first, int64_t size) : first(first), size(size), begin(0), count(1) {
    if (q.groups == 1 || q.format->scales == Scales::kInBlocks) return;
    begin = first == 0 ? 0 : first / q.group;
    count = (first + size - 1) / q.group + 1 - begin;
  }
};

// The scales and zero points of the groups in some columns of a row, from that of the first column on.
struct GroupScales {
  alignas(64) float scale[kMostColumns / 32], zero[kMostColumns / 32];
  bool bounded = true;

  GroupScales(const Quantized& q, int64_t row, const Columns& columns) {
    const int64_t share = q.format->scales == Scales::kByRows ? 1 : q.group_rows;
    const int64_t scale_row = share == 1 ? row : share == 0 ? 0 : row / share;
    const int64_t at = scale_row * q.groups + columns.begin;
    for (int64_t i = 0; i < columns.count; i += 16) {
      const auto lanes = static_cast<__mmask16>((uint32_t{1} << std::min<int64_t>(16, columns.count - i)) - 1);
      const __m512 some = scales(q, at + i, lanes);
      _mm512_store_ps(scale + i, some);
      bounded = bounded && are_bounded(some);
      _mm512_store_ps(zero + i, zeros(q, row, columns.begin + i, at + i, lanes));
    }
  }
  Line line(int64_t group) const { return {zero[group], scale[group]}; }

 private:
  static __m512 scales(const Quantized& q, int64_t at, __mmask16 lanes) {
    switch (q.scale_type) {
      case ScaleType::kFloat32:
        return _mm512_maskz_loadu_ps(lanes, static_cast<const char*>(q.scales) + 4 * at);
      case ScaleType::kBFloat16:
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words(q, at, lanes)), 16));
      case ScaleType::kFloat16:
        return _mm512_cvtph_ps(words(q, at, lanes));
      case ScaleType::kPower:
        break;
    }
    const __m512i e = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(lanes, static_cast<const char*>(q.scales) + at));
    const __m512i normal = _mm512_slli_epi32(e, 23), zero = _mm512_setzero_si512();
    const __m512i power =
        _mm512_mask_mov_epi32(normal, _mm512_cmpeq_epi32_mask(e, zero), _mm512_set1_epi32(0x00400000));
    const __mmask16 lost = _mm512_cmpeq_epi32_mask(e, _mm512_set1_epi32(255));
    return _mm512_castsi512_ps(_mm512_mask_mov_epi32(power, lost, _mm512_set1_epi32(0x7fc00000)));
  }
  static __m256i words(const Quantized& q, int64_t at, __mmask16 lanes) {
    return _mm256_maskz_loadu_epi16(lanes, static_cast<const char*>(q.scales) + 2 * at);
  }
  static __m512 zeros(const Quantized& q, int64_t row, int64_t group, int64_t at, __mmask16 lanes) {
    const int bits = q.format->bits;
    if (q.format->zeros != Zeros::kWords) {
      if (q.zeros == nullptr) return _mm512_setzero_ps();
      return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(lanes, q.zeros + at)));
    }
    if (q.zeros == nullptr) return _mm512_set1_ps(static_cast<float>(1 << (bits - 1)));
    const int64_t bit = row * bits;
    const __m512i word = _mm512_maskz_loadu_epi32(lanes, q.zeros + 4 * (bit / 32 * q.groups + group));
    const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(bit % 32));
    return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srl_epi32(word, shift), _mm512_set1_epi32((1 << bits) - 1)));
  }
};

// Rows of codes of `kBits` bits whose groups are multiples of 32.
template <int kBits>
struct Grouped {
  static constexpr bool kGrouped = true;
  static constexpr int kColumns = 128, kLineBytes = 4 * kBits;
  GroupScales scales;
  const uint8_t* from;
  bool bounded;

  Grouped(const Quantized& q, int64_t row, const Columns& columns)
      : scales(q, row, columns), from(q.codes + row * q.row_bytes), bounded(scales.bounded) {}
  const uint8_t* codes(int64_t k) const { return from + k * kBits / 8; }
};

template <class P>
struct Fp8 : Grouped<8> {
  using Grouped::Grouped;
  struct Run {
    const uint8_t* from;
    __m512 scale;  // times 2^8

    typename P::Line line(int i) const {
      // A code is a float16 2^8 too small, except those that are no numbers.
      const __m256i bytes = load32(from + 32 * i), all = _mm256_set1_epi8(127);
      const __mmask32 lost = _mm256_cmpeq_epi8_mask(_mm256_and_si256(bytes, all), all);
      const __m512i shifted = _mm512_srai_epi16(_mm512_slli_epi16(_mm512_cvtepu8_epi16(bytes), 8), 1);
      const __m512i halves = _mm512_and_si512(shifted, _mm512_set1_epi16(static_cast<int16_t>(0xbf80)));
      const __m512 low = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
      const __m512 high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
      const __m512i result = join(_mm512_mul_ps(low, scale), _mm512_mul_ps(high, scale));
      return P::of(_mm512_mask_mov_epi16(result, lost, _mm512_set1_epi16(0x7fc0)));
    }
  };
  Run run(int64_t k, int64_t group) const { return {codes(k), _mm512_set1_ps(256.0f * scales.scale[group])}; }
};

// Bytes less a zero point, signed or not.
template <class P, bool kSigned>
struct Bytes : Grouped<8> {
  using Grouped::Grouped;
  struct Run {
    const uint8_t* from;
    __m512 zero, scale;

    Run(const uint8_t* from, const Line& by)
        : from(from), zero(_mm512_set1_ps(by.zero)), scale(_mm512_set1_ps(by.scale)) {}
    typename P::Line line(int i) const {
      const auto wide = [](const uint8_t* p) {
        return _mm512_cvtepi32_ps(kSigned ? _mm512_cvtepi8_epi32(load16(p)) : _mm512_cvtepu8_epi32(load16(p)));
      };
      const uint8_t* const p = from + 32 * i;
      return P::of(join(_mm512_mul_ps(_mm512_sub_ps(wide(p), zero), scale),
                        _mm512_mul_ps(_mm512_sub_ps(wide(p + 16), zero), scale)));
    }
  };
  Run run(int64_t k, int64_t group) const { return {codes(k), scales.line(group)}; }
};
template <class P>
using SignedBytes = Bytes<P, true>;
template <class P>
using UnsignedBytes = Bytes<P, false>;

#if defined(__AVX512VBMI__)
// The same in the middle of their range, by scales of at most 15 bits.
template <class P, bool kSigned>
struct NarrowBytes : Grouped<8> {
  NarrowBytes(const Quantized& q, int64_t row, const Columns& columns) : Grouped(q, row, columns) {
    bounded = bounded && serves(q);
    // Products with none of these are so small that a part of the sum would be lost.
    const __m512i least = _mm512_set1_epi32(0x0d800000), sign = _mm512_set1_epi32(0x7fffffff);
    for (int64_t i = 0; i < columns.count; i += 16) {
      const __m512i some = _mm512_and_si512(_mm512_load_si512(scales.scale + i), sign);
      bounded = bounded && _mm512_mask_cmplt_epu32_mask(_mm512_test_epi32_mask(some, some), some, least) == 0;
    }
  }
  static bool serves(const Quantized& like) {
    return like.zeros == nullptr && (like.scale_type == ScaleType::kBFloat16 || like.scale_type == ScaleType::kFloat16);
  }
  struct Run {
    const uint8_t* from;
    __m512 scale;

    typename P::Line line(int i) const {
      const __m256i bytes = load32(from + 32 * i);
      return P::of(narrow_numbers(kSigned ? signs_turned(bytes) : bytes, scale));
    }
  };
  Run run(int64_t k, int64_t group) const { return {codes(k), _mm512_set1_ps(scales.scale[group])}; }
};
#endif

template <class P>
struct Nibbles : Grouped<4> {
  using Grouped::Grouped;
  struct Run {
    const uint8_t* from;
    Table<P> table;

    Run(const uint8_t* from, Table<P> table) : from(from), table(table) {}
    Run(const uint8_t* from, const Line& by) : Run(from, Table<P>(numbers_of(by))) {}  // bounded or not
    typename P::Line line(int i) const { return table.by_pairs(from + 16 * i); }
    typename P::Line line_of_whole(int i) const
      requires requires { table.by_quads(from, i); }
    {
      return table.by_quads(from, i);
    }
  };
  Run run(int64_t k, int64_t group) const { return {codes(k), Table<P>::bounded(numbers_of(scales.line(group)))}; }
};

// The numbers of E2M1 times every power of two that a byte says, as tables of Pairs; what is subnormal is zero there.
struct E2m1Tables {
  uint16_t number[256][32] = {};
  constexpr E2m1Tables() {
    constexpr int kExponent[8] = {0, 0, 1, 1, 2, 2, 3, 3};  // of twice the numbers
    for (int e = 0; e < 256; ++e) {
      for (int i = 0; i < 32; ++i) {
        const int code = i % 8, exponent = e - 1 + kExponent[code], sign = i % 16 / 8 << 15;
        const int bits = exponent >= 255 ? 0x7f80 : exponent << 7 | (code % 2 == 1 && code > 1 ? 0x40 : 0);
        number[e][i] = static_cast<uint16_t>(sign | (code == 0 || exponent <= 0 ? 0 : bits));
      }
    }
  }
};
template <class P>
Table<P> e2m1_table(uint8_t e) {
  if constexpr (std::is_same_v<P, Pairs>) {
    alignas(64) static constexpr E2m1Tables kTables;
    return Table<P>(_mm512_load_si512(kTables.number[e]));
  } else {
    return Table<P>::exact(_mm512_mul_ps(_mm512_loadu_ps(kTwiceE2m1), _mm512_set1_ps(half_power_of(e))));
  }
}

// MXFP4 of two tensors: 32 columns share a scale.
template <class P>
struct Mx {
  static constexpr bool kGrouped = false;
  static constexpr int kColumns = 128, kLineBytes = 16;
  static constexpr bool bounded = true;  // nothing is rounded
  const uint8_t *from, *scales;

  Mx(const Quantized& q, int64_t row, const Columns&)
      : from(q.codes + row * q.row_bytes), scales(static_cast<const uint8_t*>(q.scales) + row * q.groups) {}
  const uint8_t* codes(int64_t k) const { return from + k / 2; }
  struct Run {
    const uint8_t *from, *scales;

    Table<P> table(int i) const { return e2m1_table<P>(scales[i]); }
    typename P::Line line(int i) const { return table(i).by_pairs(from + 16 * i); }
    typename P::Line line_of_whole(int i) const
      requires requires { table(i).by_quads(from, i); }
    {
      return table(i).by_quads(from, i);
    }
  };
  Run run(int64_t k, int64_t) const { return {codes(k), scales + k / 32}; }
};

// ---------------------------------------------------------------------------------------------------------------------
// ggml's blocks of 32.

struct Order {
  uint16_t index[32];
};

template <class P, class Row>
struct SmallBlocks {
  static constexpr bool kLeast = std::is_same_v<Row, formats::Q4_1> || std::is_same_v<Row, formats::Q5_1>;
  static constexpr bool kFive = std::is_same_v<Row, formats::Q5_0> || std::is_same_v<Row, formats::Q5_1>;
  static constexpr int kHead = kE2m1<Row> ? 1 : kLeast ? 4 : 2;
  static constexpr bool kGrouped = false;
  static constexpr int kColumns = 128, kLineBytes = Row::kTraits.block_bytes;
  static constexpr bool kEvenly = kHead == 2 && kLineBytes != 22;  // sixteen scales by permutations

  alignas(64) float scale[kMostColumns / 32], least[kMostColumns / 32];
  bool bounded = true;
  const uint8_t* from;
  int64_t first;

  SmallBlocks(const Quantized& q, int64_t row, const Columns& columns)
      : from(q.codes + row * q.row_bytes), first(columns.first) {
    const int64_t blocks = kE2m1<Row> ? 0 : columns.size / 32;
    for (int64_t i = 0; i < blocks; i += 16) {
      const uint8_t* const at = codes(first + 32 * i);
      if constexpr (kEvenly) {
        if (blocks - i >= 16) {
          keep(i, _mm512_cvtph_ps(halves16(at)));
          continue;
        }
      }
      keep(i, gathered(at, blocks - i));
    }
  }
  const uint8_t* codes(int64_t k) const { return from + k / 32 * kLineBytes; }

  struct Run {
    const uint8_t* from;
    const float *scales, *leasts;

    typename P::Line line(int i) const {
      const uint8_t* const p = from + i * kLineBytes;
      if constexpr (kE2m1<Row>) return e2m1_table<P>(*p).by_halves(p + kHead);
      const __m512 scale = _mm512_set1_ps(scales[i]), sixteen = _mm512_set1_ps(16), values = counting();
      if constexpr (std::is_same_v<Row, formats::Q8_0>) return P::of(scaled_bytes(load32(p + 2), scale, scale));
      if constexpr (std::is_same_v<Row, formats::Iq4Nl>) return four(p, _mm512_mul_ps(_mm512_loadu_ps(kIq4), scale));
      if constexpr (kLeast) {
        const __m512 least = _mm512_set1_ps(leasts[i]), low = _mm512_fmadd_ps(values, scale, least);
        return kFive ? five(p, low, _mm512_fmadd_ps(_mm512_add_ps(values, sixteen), scale, least)) : four(p, low);
      }
      if constexpr (kFive)
        return five(p, _mm512_mul_ps(_mm512_sub_ps(values, sixteen), scale), _mm512_mul_ps(values, scale));
      return four(p, _mm512_mul_ps(_mm512_sub_ps(values, _mm512_set1_ps(8)), scale));
    }

   private:
    static typename P::Line four(const uint8_t* p, __m512 values) {
      return Table<P>::bounded(values).by_halves(p + kHead);
    }
    static typename P::Line five(const uint8_t* p, __m512 low, __m512 high) {
      const __m512i fifth = _mm512_maskz_set1_epi16(word_at(p + kHead, 0), 16);
      return P::of(look_up(select(15, by_halves(p + kHead + 4), fifth), join(low, high)));
    }
  };
  Run run(int64_t k, int64_t) const {
    return {codes(k), scale + (k - first) / 32, kLeast ? least + (k - first) / 32 : nullptr};
  }

 private:
  // The halves at the beginning of sixteen blocks: as many at a time as begin in sixty-four words.
  static __m256i halves16(const uint8_t* p) {
    constexpr int kOnce = kLineBytes == 18 ? 8 : 4;
    static_assert((kOnce - 1) * kLineBytes < 128);
    __m512i result = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += kOnce, p += kOnce * kLineBytes) {
      Order places = {};
      for (int j = 0; j < kOnce; ++j) places.index[i + j] = static_cast<uint16_t>(j * kLineBytes / 2);
      const __m512i some = _mm512_permutex2var_epi16(_mm512_loadu_si512(p), _mm512_loadu_si512(places.index),
                                                     _mm512_loadu_si512(p + 64));
      result = _mm512_mask_mov_epi16(result, ((__mmask32{1} << kOnce) - 1) << i, some);
    }
    return _mm512_castsi512_si256(result);
  }
  // Of at most sixteen blocks, two bytes of each.
  __m512 gathered(const uint8_t* p, int64_t count) {
    const __m512i blocks = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i places = _mm512_mullo_epi32(blocks, _mm512_set1_epi32(kLineBytes));
    const auto lanes = static_cast<__mmask16>((uint32_t{1} << std::min<int64_t>(16, count)) - 1);
    const __m512i heads = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), lanes, places, p, 1);
    if constexpr (kLeast) {
      const __m512 others = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(heads, 16)));
      _mm512_store_ps(least + (p - codes(first)) / kLineBytes, others);
      bounded = bounded && are_bounded(others);
    }
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(heads));
  }
  void keep(int64_t block, __m512 scales) {
    _mm512_store_ps(scale + block, scales);
    bounded = bounded && are_bounded(scales);
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Of 256: Block(p) is a run, which reads what the eight lines of a block share; line(i) is the i-th of all.

inline uint32_t low_bits(uint32_t bytes, int shift, int mask) {
  return (bytes >> shift) & (0x01010101u * static_cast<uint32_t>(mask));
}
inline __m128i four_words(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return _mm_setr_epi32(static_cast<int>(a), static_cast<int>(b), static_cast<int>(c), static_cast<int>(d));
}

template <class P, bool kFive>
struct KBlock {
  explicit KBlock(const uint8_t* p) : from(p + (kFive ? 48 : 16)) {
    const uint32_t a = word_at(p, 1), b = word_at(p, 2), shared = word_at(p, 3);
    const __m128i packed = four_words(low_bits(a, 0, 63), low_bits(shared, 0, 15) | low_bits(a, 2, 48),
                                      low_bits(b, 0, 63), low_bits(shared, 4, 15) | low_bits(b, 2, 48));
    const __m512 halves = _mm512_insertf32x8(half_of(p), _mm512_castps512_ps256(half_of(p + 2)), 1);
    _mm512_store_ps(steps, _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(packed)), halves));
    if constexpr (kFive) fifth = _mm512_slli_epi16(_mm512_cvtepu8_epi16(load32(p + 16)), 4);
  }
  static bool is_bounded(const uint8_t* p) { return is_bounded_half(p) && is_bounded_half(p + 2); }
  typename P::Line line(int i) const {
    const __m512 step = _mm512_set1_ps(steps[i]), below = _mm512_set1_ps(steps[8 + i]);
    const __m512 low = _mm512_fmsub_ps(counting(), step, below);
    if constexpr (!kFive) return Table<P>::bounded(low).by_bytes(from + 32 * (i / 2), 4 * (i % 2));
    const __m512i two = _mm512_cvtepu8_epi16(load32(from + 32 * (i / 2)));
    const __m512i index = i % 2 == 0 ? two : _mm512_srli_epi16(two, 4);
    const __m512 high = _mm512_fmsub_ps(_mm512_add_ps(counting(), _mm512_set1_ps(16)), step, below);
    return P::of(look_up(select(15, index, _mm512_srl_epi16(fifth, _mm_cvtsi32_si128(i))), join(low, high)));
  }

  alignas(64) float steps[16];  // of eight groups, and what is subtracted
  const uint8_t* from;
  __m512i fifth;
};
template <class P>
using Q4Block = KBlock<P, false>;
template <class P>
using Q5Block = KBlock<P, true>;

// Indices of two bits, and the sixteenth entry on for the second half of a line.
inline __m512i by_quarters(__m512i four, int i) {
  const __m512i upper = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
  return select(3, _mm512_srl_epi16(four, _mm_cvtsi32_si128(2 * (i % 4))), upper);
}

template <class P>
struct Q2Block {
  explicit Q2Block(const uint8_t* p) : from(p + 16) {
    const __m512i packed = _mm512_cvtepu8_epi32(load16(p));
    const __m512i low = _mm512_and_si512(packed, _mm512_set1_epi32(15)), high = _mm512_srli_epi32(packed, 4);
    _mm512_store_ps(steps, _mm512_mul_ps(_mm512_cvtepi32_ps(low), half_of(p + 80)));
    _mm512_store_ps(below, _mm512_mul_ps(_mm512_cvtepi32_ps(high), half_of(p + 82)));
  }
  static bool is_bounded(const uint8_t*) { return true; }
  typename P::Line line(int i) const {
    const __m512 values = _mm512_setr_ps(0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3);
    const __m512 a = _mm512_fmsub_ps(values, _mm512_set1_ps(steps[2 * i]), _mm512_set1_ps(below[2 * i]));
    const __m512 b = _mm512_fmsub_ps(values, _mm512_set1_ps(steps[2 * i + 1]), _mm512_set1_ps(below[2 * i + 1]));
    return P::of(look_up(by_quarters(_mm512_cvtepu8_epi16(load32(from + 32 * (i / 4))), i), join(a, b)));
  }

  alignas(64) float steps[16], below[16];
  const uint8_t* from;
};

template <class P>
struct Q3Block {
  explicit Q3Block(const uint8_t* p) : from(p + 32), third(_mm512_slli_epi16(_mm512_cvtepu8_epi16(load32(p)), 2)) {
    const uint32_t a = word_at(p, 24), b = word_at(p, 25), c = word_at(p, 26);
    const __m128i packed =
        four_words(low_bits(a, 0, 15) | low_bits(c, 0, 3) << 4, low_bits(b, 0, 15) | low_bits(c, 2, 3) << 4,
                   low_bits(a, 4, 15) | low_bits(c, 4, 3) << 4, low_bits(b, 4, 15) | low_bits(c, 6, 3) << 4);
    const __m512i scales = _mm512_sub_epi32(_mm512_cvtepu8_epi32(packed), _mm512_set1_epi32(32));
    _mm512_store_ps(steps, _mm512_mul_ps(_mm512_cvtepi32_ps(scales), half_of(p + 108)));
  }
  static bool is_bounded(const uint8_t*) { return true; }
  typename P::Line line(int i) const {
    const __m512 values = _mm512_setr_ps(-4, -3, -2, -1, 0, 1, 2, 3, -4, -3, -2, -1, 0, 1, 2, 3);
    const __m512i quarters = by_quarters(_mm512_cvtepu8_epi16(load32(from + 32 * (i / 4))), i);
    const __m512i index = select(4, _mm512_srl_epi16(third, _mm_cvtsi32_si128(i)), quarters);
    return P::of(look_up(index, join(_mm512_mul_ps(values, _mm512_set1_ps(steps[2 * i])),
                                     _mm512_mul_ps(values, _mm512_set1_ps(steps[2 * i + 1])))));
  }

  alignas(64) float steps[16];
  const uint8_t* from;
  __m512i third;
};

template <class P>
struct Q6Block {
  explicit Q6Block(const uint8_t* p) : from(p) {
    _mm512_store_ps(steps, _mm512_mul_ps(floats_of(load16(p + 192)), half_of(p + 208)));
  }
  static bool is_bounded(const uint8_t*) { return true; }
  typename P::Line line(int i) const {
    const int half = i / 4, quarter = i % 4;
    const __m256i low = load32(from + 64 * half + 32 * (quarter % 2)), high = load32(from + 128 + 32 * half);
    const __m256i four = _mm256_srl_epi16(low, _mm_cvtsi32_si128(4 * (quarter / 2)));
    const __m256i bits = _mm256_and_si256(high, _mm256_set1_epi8(static_cast<char>(3 << (2 * quarter))));
    const __m256i two =
        quarter == 3 ? _mm256_srli_epi16(bits, 2) : _mm256_sll_epi16(bits, _mm_cvtsi32_si128(4 - 2 * quarter));
    const __m256i codes = _mm256_or_si256(_mm256_and_si256(four, _mm256_set1_epi8(15)), two);
    return P::of(scaled_bytes(_mm256_sub_epi8(codes, _mm256_set1_epi8(32)), _mm512_set1_ps(steps[2 * i]),
                              _mm512_set1_ps(steps[2 * i + 1])));
  }

  alignas(64) float steps[16];
  const uint8_t* from;
};

template <class P>
struct Iq4Block {
  explicit Iq4Block(const uint8_t* p) : from(p + 8) {
    for (int i = 0; i < 8; ++i) steps[i] = half_at(p) * iq4_scale(p, i);
  }
  static bool is_bounded(const uint8_t* p) { return is_bounded_half(p); }
  typename P::Line line(int i) const {
    return Table<P>::bounded(_mm512_mul_ps(_mm512_loadu_ps(kIq4), _mm512_set1_ps(steps[i]))).by_halves(from + 16 * i);
  }

  float steps[8];
  const uint8_t* from;
};

template <class P, template <class> class Block, class Row>
struct LargeBlocks {
  static constexpr bool kGrouped = false;
  static constexpr int kColumns = 256, kLineBytes = Row::kTraits.block_bytes / 8;
  const uint8_t* from;

  bool bounded = true;

  LargeBlocks(const Quantized& q, int64_t row, const Columns& columns) : from(q.codes + row * q.row_bytes) {
    for (int64_t k = columns.first; k < columns.first + columns.size; k = (k / 256 + 1) * 256)
      bounded = bounded && Block<P>::is_bounded(codes(k));
  }
  const uint8_t* codes(int64_t k) const { return from + k / 256 * Row::kTraits.block_bytes; }
  using Run = Block<P>;
  Run run(int64_t k, int64_t) const { return Run(codes(k)); }
};

// ---------------------------------------------------------------------------------------------------------------------

// run(k, stop, group) for the runs of columns up to `end`.
template <class Format, class F>
inline __attribute__((always_inline)) void each_run(const Quantized& q, const Columns& columns, int64_t end, F&& run) {
  constexpr int64_t kMost = Format::kColumns;
  int64_t group = 0, last = end;
  if (Format::kGrouped && q.groups > 1) last = (columns.begin + 1) * q.group;
  for (int64_t k = columns.first, stop; k < end; k = stop) {
    stop = std::min({k / kMost * kMost + kMost, end, last});
    run(k, stop, group);
    if (Format::kGrouped && stop == last) ++group, last += q.group;
  }
}

// line(i, whether all are asked for) of those of a run from column k to `stop`.
template <class Format, class F>
inline __attribute__((always_inline)) void each_line(int64_t k, int64_t stop, F&& line) {
  const auto first = static_cast<int>(Format::kColumns == 256 ? k % 256 / 32 : 0);
  const auto end = first + static_cast<int>((stop - k) / 32);
  if (first == 0 && end == Format::kColumns / 32) {
#pragma GCC unroll 8
    for (int i = 0; i < Format::kColumns / 32; ++i) line(i, std::true_type());
  } else {
    for (int i = first; i < end; ++i) line(i, std::false_type());
  }
}

template <class Format>
constexpr int kRunBytes = Format::kColumns / 32 * Format::kLineBytes;

template <class Run, class Whole>
inline __attribute__((always_inline)) auto line_of(const Run& run, int i, Whole) {
  if constexpr (Whole::value && requires { run.line_of_whole(i); }) {
    return run.line_of_whole(i);
  } else {
    return run.line(i);
  }
}

// Fetches what lies `lead` bytes after the codes of a run of columns from k on.
template <class Format>
inline __attribute__((always_inline)) void fetch_run(const Format& row, int64_t k, int64_t lead) {
#pragma GCC unroll 8
  for (int at = 0; at < kRunBytes<Format>; at += 64) fetch_from(row.codes(k) + at, lead);
}

}  // namespace
}  // namespace moelight
