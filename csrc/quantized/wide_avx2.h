// The numbers of quantised matrices for products of bf16 activations (ffn/pairs_avx2.h): rounded to bf16, as floats, of
// each sixteen first the even ones, then the odd ones. They are stored for many tokens, and meet few of them in
// registers. A zero has no sign here. Internal linkage.
#pragma once

#include "affine_avx2.h"
#include "ffn/pair_lanes_avx2.h"

namespace moelight {
namespace {

// The same of bounded numbers: the sum with 1.5 * 2^16 times its power of two has as many bits left.
inline __m256 rounded_to_pairs(__m256 x) {
  const __m256 power = _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xff800000))));
  const __m256 far = _mm256_set1_ps(98304.0f), sum = _mm256_fmadd_ps(power, far, x);
  return _mm256_fnmadd_ps(power, far, sum);
}

// Codes of four bits whose numbers many columns share are looked up.
template <class Format>
constexpr bool kLooksUp = kCodeValues<Format> != nullptr || std::is_same_v<Format, formats::Packed<4>> ||
                          std::is_same_v<Format, formats::Mlx<4>>;

// The bytes of sixteen bf16.
struct PairTable {
  __m256i low, high;

  template <class Format>
  static PairTable of(float times, float less) {
    __m256 values[2] = {_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_ps(8, 9, 10, 11, 12, 13, 14, 15)};
    __m128i words[2];
    for (int i = 0; i < 2; ++i) {
      if constexpr (kCodeValues<Format> != nullptr) values[i] = _mm256_loadu_ps(kCodeValues<Format> + 8 * i);
      const __m256 number = rounded_to_pairs(number_of<Format>(values[i], _mm256_set1_ps(times), &less));
      const __m256i bits = _mm256_srli_epi32(_mm256_castps_si256(number), 16);
      words[i] = _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    }
    const auto bytes = [&](auto part) {
      return _mm256_broadcastsi128_si256(_mm_packus_epi16(part(words[0]), part(words[1])));
    };
    return {bytes([](__m128i word) { return _mm_and_si128(word, _mm_set1_epi16(255)); }),
            bytes([](__m128i word) { return _mm_srli_epi16(word, 8); })};
  }
};

// The bytes of sixteen numbers of E2M1, twice; a zero has no sign.
inline PairTable e2m1_pairs() {
  const auto twice = [](__m128i bytes) { return _mm256_broadcastsi128_si256(bytes); };
  return {twice(_mm_setr_epi8(0, -128, 0, 64, -128, -64, 0, 64, 0, -128, 0, 64, -128, -64, 0, 64)),
          twice(_mm_setr_epi8(0, 63, 64, 64, 64, 64, 65, 65, 0, -65, -64, -64, -64, -64, -63, -63))};
}
template <class Format>
constexpr bool kScalesPairs = kE2m1<Format> || kBySixteen<Format>;

// Codes become floats without a conversion, as a byte of the mantissa of a power of two: those of eight bits the second
// byte of 2^15 and more, others the third byte of 2^7 and more. kMantissaZero is what stands for zero.
template <class Format>
constexpr bool kEightBits = kSignedBytes<Format> || std::is_same_v<Format, formats::Packed<8>>;
template <class Format>
constexpr int kMantissaBits = kSignedBytes<Format> ? 0x47008000
                              : kEightBits<Format> ? 0x47000000
                                                   : 0x43000000;
template <class Format>
constexpr float kMantissaZero = kSignedBytes<Format> ? 32896.0f
                                : kEightBits<Format> ? 32768.0f
                                                     : 128.0f + static_cast<float>(kMiddle<Format>);
// Of crossed codes, by parts: the even ones of sixteen, then the odd ones.
template <int kByte>
struct MantissaPlaces {
  alignas(32) int8_t bytes[4][32] = {};
  constexpr MantissaPlaces() {
    for (int part = 0; part < 4; ++part)
      for (int i = 0; i < 32; ++i)
        bytes[part][i] = static_cast<int8_t>(i % 4 == kByte ? part / 2 * 8 + part % 2 + i % 16 / 4 * 2 : -1);
  }
};
template <class Format, int kPart>
inline __m256 mantissas_of(__m256i crossed) {
  static constexpr MantissaPlaces<kEightBits<Format> ? 1 : 2> kPlaces;
  const __m256i places = _mm256_load_si256(reinterpret_cast<const __m256i*>(kPlaces.bytes[kPart]));
  const __m256i bytes = _mm256_shuffle_epi8(crossed, places);
  return _mm256_castsi256_ps(_mm256_xor_si256(bytes, _mm256_set1_epi32(kMantissaBits<Format>)));
}

// E4M3 as float16, which are 2^8 smaller: words with a code in the upper byte.
inline __m256 floats_of_e4m3(__m128i upper_bytes) {
  return _mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(upper_bytes, 1), _mm_set1_epi16(static_cast<int16_t>(0xbf80))));
}

// A row whose numbers are asked for by thirty-two columns, of those that were entered.
template <class Format>
class WideRow {
 public:
  WideRow(const Quantized& q, int64_t row) : q_(q), row_(row), line_(q.codes + row * q.row_bytes) {}

  const uint8_t* line() const { return line_; }

  // Columns [first, first + size), at most kAffineColumns, from a group on. False where a number may be huge, tiny or
  // none.
  bool load_scales(int64_t first, int64_t size, int64_t group) {
    base_ = first / 256 * 256, table_stop_ = first, group_ = group;
    affines_of<Format>(q_, row_, first, size, group, affines_);
    return are_bounded<Format>(affines_, first, size) && has_numbers(first, size);
  }

  // Columns [k, k + 32), ascending; their numbers are part<0>() to part<3>().
  struct Columns {
    const float *times, *less;
    __m256i codes, highs;
  };
  inline __attribute__((always_inline)) Columns columns(int64_t k) {
    const auto i = static_cast<uint64_t>(k - base_) / 16;
    Columns result = {affines_.times + i, affines_.less + i, {}, {}};
    if constexpr (kLooksUp<Format>) {
      if (k >= table_stop_) {
        table_ = PairTable::of<Format>(*result.times, *result.less);
        table_stop_ = q_.groups == 1 ? q_.columns : ++group_ * q_.group;
      }
    }
    if constexpr (kLooksUp<Format> || kScalesPairs<Format>) {
      const __m256i codes = crossed_codes<Format>(line_, static_cast<uint64_t>(k));
      const PairTable table = kLooksUp<Format> ? table_ : e2m1_pairs();
      result.codes = _mm256_shuffle_epi8(table.low, codes), result.highs = _mm256_shuffle_epi8(table.high, codes);
    } else if constexpr (kMiddle<Format> != 0) {
      result.codes = crossed_codes<Format>(line_, static_cast<uint64_t>(k));
    } else if constexpr (std::is_same_v<Format, formats::Fp8>) {
      result.codes = bytes_at(line_ + k);
    } else {
      const __m256i order = _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15, 0, 2, 4, 6, 8, 10,
                                             12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
      result.codes = _mm256_shuffle_epi8(number_codes<Format>(line_, k), order);
    }
    return result;
  }
  // Eight of each sixteen: the even ones, then the odd ones.
  template <int kPart>
  inline __attribute__((always_inline)) __m256 part(const Columns& of) const {
    const __m256 times = _mm256_broadcast_ss(of.times + kPart / 2);
    if constexpr (kLooksUp<Format> || kScalesPairs<Format>) {
      const __m256i pairs =
          kPart < 2 ? _mm256_unpacklo_epi8(of.codes, of.highs) : _mm256_unpackhi_epi8(of.codes, of.highs);
      const __m256 value = kPart % 2 == 0 ? even_of(pairs) : odd_of(pairs);
      if constexpr (kLooksUp<Format>) return value;
      const __m256 number = _mm256_mul_ps(value, times);
      return kE2m1<Format> ? number : rounded_to_pairs(number);
    }
    if constexpr (kMiddle<Format> != 0) {  // products of mantissas with steps of a block need no rounding
      const __m256 zero = _mm256_mul_ps(times, _mm256_set1_ps(kMantissaZero<Format>));
      return rounded_to_pairs(_mm256_fmsub_ps(mantissas_of<Format, kPart>(of.codes), times, zero));
    }
    const __m128i half = kPart < 2 ? _mm256_castsi256_si128(of.codes) : _mm256_extracti128_si256(of.codes, 1);
    if constexpr (std::is_same_v<Format, formats::Fp8>) {
      const __m128i upper = kPart % 2 == 0 ? _mm_slli_epi16(half, 8) : half;
      return rounded_to_pairs(_mm256_mul_ps(floats_of_e4m3(upper), _mm256_set1_ps(256.0f * *of.times)));
    }
    const __m256 code = floats_of_bytes<kSignedCodes<Format>>(kPart % 2 == 0 ? half : _mm_unpackhi_epi64(half, half));
    return rounded_to_pairs(number_of<Format>(code, times, of.less + kPart / 2));
  }

 private:
  // E4M3 has codes that are none.
  bool has_numbers(int64_t first, int64_t size) const {
    if constexpr (!std::is_same_v<Format, formats::Fp8>) return true;
    __m256i lost = _mm256_setzero_si256();
    const __m256i magnitude = _mm256_set1_epi8(127);
    for (int64_t k = first; k < first + size; k += 32)
      lost = _mm256_or_si256(lost, _mm256_cmpeq_epi8(_mm256_and_si256(bytes_at(line_ + k), magnitude), magnitude));
    return _mm256_testz_si256(lost, lost) != 0;
  }

  const Quantized& q_;
  const int64_t row_;
  const uint8_t* const line_;
  int64_t base_ = 0, table_stop_ = 0, group_ = 0;
  PairTable table_ = {};
  Affines affines_;
};

// What the plain code gives, in the order of lanes.
inline void widen_plainly(const Quantized& q, int64_t row, int64_t first, int64_t size, float* to) {
  alignas(64) float line[kMostColumns + kUnpackStep];
  unpack_plainly<float, Bf16>(q, row, 1, first, size, 0, line, 0);
  const int64_t all = (size + kUnpackStep - 1) / kUnpackStep * kUnpackStep;
  for (int64_t i = 0; i < all; ++i) to[i / 16 * 16 + i % 2 * 8 + i % 16 / 2] = line[i];
}

// by(part) of the four parts of thirty-two columns.
template <class F>
inline __attribute__((always_inline)) void in_parts(const F& by) {
  by(std::integral_constant<int, 0>()), by(std::integral_constant<int, 1>());
  by(std::integral_constant<int, 2>()), by(std::integral_constant<int, 3>());
}

// Codes of eight bits, or of four and one, are widened to memory, with what they share in registers: few tokens meet
// them there in 2.1 ms instead of 2.5 (two tokens, Q8_0 of 3584 x 1024 on a Zen 1).
template <class Format>
constexpr bool kMeetsFew = !kSignedBytes<Format> && !std::is_same_v<Format, formats::Packed<8>> &&
                           !std::is_same_v<Format, formats::Q5_0> && !std::is_same_v<Format, formats::Q5_1>;

// Those of columns that share a scale: eight numbers of thirty-two crossed codes.
template <class Format>
struct SharedNumbers {
  __m256 times, zero, less;

  explicit SharedNumbers(const Affine& by)
      : times(_mm256_set1_ps(by.times)),
        zero(_mm256_set1_ps(kMantissaZero<Format> + (kNumberForm<Format> == NumberForm::kZeroed ? by.less : 0.0f))),
        less(kNumberForm<Format> == NumberForm::kScaled ? _mm256_mul_ps(times, zero) : _mm256_set1_ps(by.less)) {}

  template <int kPart>
  inline __attribute__((always_inline)) __m256 part(__m256i codes) const {
    const __m256 code = mantissas_of<Format, kPart>(codes);
    // Products of mantissas with float16 need no rounding; with other scales they may.
    if constexpr (kNumberForm<Format> == NumberForm::kScaled)
      return rounded_to_pairs(_mm256_fmsub_ps(code, times, less));
    if constexpr (kNumberForm<Format> == NumberForm::kZeroed)
      return rounded_to_pairs(_mm256_mul_ps(_mm256_sub_ps(code, zero), times));
    return rounded_to_pairs(_mm256_fmsub_ps(_mm256_sub_ps(code, zero), times, less));
  }
};

// A part of a row in whole steps. False, with nothing written to be read, where a number may be none.
template <class Format>
bool widen_steps(const Quantized& q, int64_t row, int64_t first, int64_t size, float* to) {
  const uint8_t* const line = q.codes + row * q.row_bytes;
  int64_t group = affine_group<Format>(q, first);
  for (int64_t k = first, end = first + size; k < end;) {
    const SharedColumns shared = shared_columns<Format>(q, row, k, end, group);
    if (!is_bounded(shared.by.times) || !is_bounded(shared.by.less)) return false;
    const SharedNumbers<Format> widened(shared.by);
    for (group = shared.group; k < shared.stop; k += 32, to += 32) {
      const __m256i codes = crossed_codes<Format>(line, static_cast<uint64_t>(k));
      in_parts([&](auto part) __attribute__((always_inline)) {
        _mm256_store_ps(to + 8 * part, widened.template part<part>(codes));
      });
    }
  }
  return true;
}

// The same of other formats.
template <class Format>
  requires kMeetsFew<Format>
bool widen_steps(const Quantized& q, int64_t row, int64_t first, int64_t size, float* to) {
  WideRow<Format> wide(q, row);
  for (int64_t begin = first, end = first + size; begin < end; begin += kAffineColumns) {
    const int64_t some = std::min(kAffineColumns, end - begin);
    if (!wide.load_scales(begin, some, affine_group<Format>(q, begin))) return false;
    for (int64_t k = begin; k < begin + some; k += 32, to += 32) {
      const typename WideRow<Format>::Columns columns = wide.columns(k);
      in_parts([&](auto part) __attribute__((always_inline)) {
        _mm256_store_ps(to + 8 * part, wide.template part<part>(columns));
      });
    }
  }
  return true;
}

template <class Format>
void unpack_wide(const Quantized& q, int64_t row, int64_t rows, int64_t first, int64_t size, int64_t lead, void* to,
                 int64_t to_bytes) {
  const int64_t stepped = size / kUnpackStep * kUnpackStep;
  for (int64_t r = 0; r < rows; ++r) {
    auto* const out = reinterpret_cast<float*>(static_cast<char*>(to) + r * to_bytes);
    fetch_part<Format>(q.codes + (row + r) * q.row_bytes, first, size, lead);
    if (!widen_steps<Format>(q, row + r, first, stepped, out)) {
      widen_plainly(q, row + r, first, size, out);
    } else if (stepped < size) {
      widen_plainly(q, row + r, first + stepped, size - stepped, out + stepped);
    }
  }
}

inline void unpack_any(const Quantized& q, int64_t row, int64_t rows, int64_t first, int64_t size, int64_t, void* to,
                       int64_t to_bytes) {
  for (int64_t r = 0; r < rows; ++r)
    widen_plainly(q, row + r, first, size, reinterpret_cast<float*>(static_cast<char*>(to) + r * to_bytes));
}

// ---------------------------------------------------------------------------------------------------------------------
// Few tokens: numbers meet them as they are unpacked.

// Numbers of a row that were unpacked.
struct LineRow {
  const float* from;
  int64_t first;

  struct Columns {
    const float* from;
  };
  Columns columns(int64_t k) const { return {from + k - first}; }
  template <int kPart>
  __m256 part(const Columns& of) const {
    return _mm256_load_ps(of.from + 8 * kPart);
  }
};

// Some rows in one block of K times all tokens; sums[c * stride + r].
template <class Row, int kRows, int kTokens>
inline __attribute__((always_inline)) void sum_block(std::array<Row, kRows>& rows, int64_t first, int64_t size,
                                                     const float* x, float* sums, int64_t stride) {
  __m256 sum[kTokens][kRows];
#pragma GCC unroll 4
  for (int c = 0; c < kTokens; ++c)
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sum[c][r] = _mm256_setzero_ps();
  for (int64_t k = first; k < first + size; k += 32, x += 32 * kTokens) {
    typename Row::Columns columns[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) columns[r] = rows[static_cast<size_t>(r)].columns(k);
    in_parts([&](auto part) __attribute__((always_inline)) {  // rows in turn, whose sums do not wait for each other
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const __m256 weights = rows[static_cast<size_t>(r)].template part<part>(columns[r]);
#pragma GCC unroll 4
        for (int c = 0; c < kTokens; ++c) sum[c][r] = madd(sum[c][r], weights, _mm256_load_ps(x + 32 * c + 8 * part));
      }
    });
  }
#pragma GCC unroll 4
  for (int c = 0; c < kTokens; ++c) add_across<kRows>(sum[c], sums + c * stride);
}

// The same where rows may not be bounded.
template <class Format, int kRows, int kTokens>
void sum_rows_of(const Quantized& q, const std::array<int64_t, kRows>& at, const float* x, int64_t lead, float* sums,
                 int64_t stride) {
  auto rows = [&]<int... kRow>(std::integer_sequence<int, kRow...>) {
    return std::array<WideRow<Format>, kRows>{WideRow<Format>(q, at[kRow])...};
  }(std::make_integer_sequence<int, kRows>());
  for (int64_t first = 0; first < q.columns; first += kAffineColumns) {
    const int64_t size = std::min(kAffineColumns, q.columns - first);
    const float* const tokens = x + first * kTokens;
    const int64_t group = affine_group<Format>(q, first);
    bool bounded = true;
    for (WideRow<Format>& row : rows) {
      fetch_part<Format>(row.line(), first, size, lead);
      bounded = row.load_scales(first, size, group) && bounded;
    }
    if (bounded) {
      sum_block<WideRow<Format>, kRows, kTokens>(rows, first, size, tokens, sums, stride);
      continue;
    }
    alignas(32) float lines[kRows][kAffineColumns];
    std::array<LineRow, kRows> stored;
    for (size_t r = 0; r < kRows; ++r) {
      widen_plainly(q, at[r], first, size, lines[r]);
      stored[r] = {lines[r], first};
    }
    sum_block<LineRow, kRows, kTokens>(stored, first, size, tokens, sums, stride);
  }
}

// SumRows: tokens lie beside each other, thirty-two numbers of all as unpacked ones do, then the next.
template <class Format, int kTokens>
void sum_rows(const Quantized& q, int64_t row, int64_t rows, const char* x, int64_t lead, int64_t tokens, float* sums,
              int64_t stride) {
  constexpr int kRows = kTokens == 4 ? 2 : 4;
  const int64_t last = row + rows - 1;  // is repeated; nobody reads those sums
  for (int64_t r = 0; r < rows; r += kRows) {
    std::array<int64_t, kRows> at;
    for (int i = 0; i < kRows; ++i) at[static_cast<size_t>(i)] = std::min(row + r + i, last);
    float dots[kTokens * kRows] = {};
    sum_rows_of<Format, kRows, kTokens>(q, at, reinterpret_cast<const float*>(x), lead, dots, kRows);
    for (int64_t c = 0; c < tokens; ++c)
      for (int64_t i = 0; i < std::min<int64_t>(kRows, rows - r); ++i) sums[c * stride + r + i] += dots[c * kRows + i];
  }
}

inline Unpacking unpacking_wide_of(const Quantized& like) {
  const bool even = like.groups == 1 || like.group % kUnpackStep == 0;
  return with_format(like, [&](auto format) -> Unpacking {
    using Format = decltype(format);
    if constexpr (kHasCodes<Format>) {
      if (kInBlocks<Format> || kBySixteen<Format> || even) {
        if constexpr (kMeetsFew<Format>)
          return {unpack_wide<Format>, sum_rows<Format, 1>, sum_rows<Format, 2>, sum_rows<Format, 4>};
        return {unpack_wide<Format>};
      }
    }
    return {unpack_any};
  });
}

}  // namespace
}  // namespace moelight
