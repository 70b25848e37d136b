// Unpacks quantised matrices for products of bf16 activations (ffn/pairs_avx2.h): numbers rounded to bf16, as floats,
// of each sixteen first the even ones, then the odd ones. Internal linkage.
#pragma once

#include "codes_avx2.h"

namespace moelight {
namespace {

inline __m256 rounded_to_pairs(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  return _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}

// What the numbers of sixteen or more codes have in common: (code - less) times, or code times - less.
struct Affine {
  float less, times;
};

template <Packing kPacking, int kBits>
struct WideFormat {
  static constexpr bool kK = kPacking == Packing::kQ4_K || kPacking == Packing::kQ5_K;
  static constexpr bool kSixth = kPacking == Packing::kQ6_K, kLarge = kK || kSixth, kFloats = kPacking == Packing::kFp8;
  static constexpr bool kSignedZero = kPacking == Packing::kMx;  // ggml has none
  static constexpr bool kE2m1 = kPacking == Packing::kMx || kPacking == Packing::kMxBlocks;
  static constexpr bool kTable =
      kE2m1 || kPacking == Packing::kQ4_0 || kPacking == Packing::kQ4_K || (kPacking == Packing::kPacked && kBits == 4);
  static constexpr bool kSigned = kPacking == Packing::kInt8 || kPacking == Packing::kQ8_0;

  const Quantized& q;
  int64_t row;
  const uint8_t* line;
  WideFormat(const Quantized& q, int64_t row) : q(q), row(row), line(q.codes + row * q.row_bytes) {}

  // The column behind those that share what column k has.
  int64_t stop(int64_t k) const {
    if (in_blocks(kPacking) || kE2m1) return k + 32;
    return q.groups == 1 ? q.columns : (k / q.group + 1) * q.group;
  }

  Affine affine(int64_t k) const {
    switch (kPacking) {
      case Packing::kMx:
        return {0.0f, half_power_of(static_cast<const uint8_t*>(q.scales)[row * q.groups + k / 32])};
      case Packing::kMxBlocks:
        return {0.0f, half_power_of(line[k / 32 * 17])};
      case Packing::kQ4_0:
        return {8.0f, half_at(line + k / 32 * 18)};
      case Packing::kQ8_0:
        return {0.0f, half_at(line + k / 32 * 34)};
      default: {
        const Line by = line_of(q, row, k / q.group);
        return {by.zero, by.scale};
      }
    }
  }

  // Of the parts of a block of 256, two for each thirty-two columns.
  void affine_of_block(int64_t k, Affine (&to)[16]) const {
    const uint8_t* const block = line + k / 256 * block_size(kPacking).bytes;
    if constexpr (kSixth) {
      const float scale = half_at(block + 208);
      for (int i = 0; i < 16; ++i) to[i] = {32.0f, scale * static_cast<float>(static_cast<int8_t>(block[192 + i]))};
    } else {
      const float scale = half_at(block), least = half_at(block + 2);
      const KScales parts(block + 4);
      for (int i = 0; i < 16; ++i) to[i] = {least * parts.least[i / 2], scale * parts.scale[i / 2]};
    }
  }

  static __m256 number(__m256 code, const Affine& by) {
    const __m256 less = _mm256_set1_ps(by.less), times = _mm256_set1_ps(by.times);
    if constexpr (kK) return _mm256_sub_ps(_mm256_mul_ps(times, code), less);
    return _mm256_mul_ps(_mm256_sub_ps(code, less), times);
  }

  static __m256 code_of(__m256i codes) {
    if constexpr (!kFloats) return _mm256_cvtepi32_ps(codes);
    const __m256i magnitude = _mm256_and_si256(codes, _mm256_set1_epi32(0x7f));
    const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(codes, _mm256_set1_epi32(0x80)), 24);
    const __m256 value = _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(magnitude, 20)),
                                       _mm256_castsi256_ps(_mm256_set1_epi32(0x7b800000)));
    const __m256i none = _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7f));
    const __m256i known = _mm256_blendv_epi8(_mm256_castps_si256(value), _mm256_set1_epi32(0x7fc00000), none);
    return _mm256_castsi256_ps(_mm256_or_si256(known, sign));
  }
};

// The numbers of sixteen codes.
struct Sixteen {
  __m256 low, high;

  __m256 at(__m256i index) const {
    const __m256 second = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, index), _mm256_permutevar8x32_ps(high, index), second);
  }
};

template <class Format>
inline Sixteen sixteen_of(const Affine& by) {
  const float* const codes = Format::kSignedZero ? kTwiceE2m1 : kDoubledE2m1;
  __m256 low = _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), high = _mm256_setr_ps(8, 9, 10, 11, 12, 13, 14, 15);
  if constexpr (Format::kE2m1) low = _mm256_loadu_ps(codes), high = _mm256_loadu_ps(codes + 8);
  return {rounded_to_pairs(Format::number(low, by)), rounded_to_pairs(Format::number(high, by))};
}

// A part of a row in whole steps. False, with nothing written to be read, where a number may be none.
template <class Format, Packing kPacking, int kBits>
bool widen_steps(const Quantized& q, int64_t row, int64_t first, int64_t size, int64_t lead, float* to) {
  const Format format(q, row);
  const __m256i order = _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15, 0, 2, 4, 6, 8, 10, 12,
                                         14, 1, 3, 5, 7, 9, 11, 13, 15);
  const int64_t ahead = q.row_bytes * first / q.columns + lead;
  for (int64_t i = 0; lead != 0 && i < q.row_bytes * size / q.columns; i += 64)
    _mm_prefetch(reinterpret_cast<const char*>(format.line) + ahead + i, _MM_HINT_T1);
  Affine block[16];
  for (int64_t k = first, end = first + size; k < end;) {
    const int64_t stop = std::min(end, format.stop(k));
    Affine by[2];
    if constexpr (Format::kLarge) {
      if (k == first || k % 256 == 0) format.affine_of_block(k, block);
      by[0] = block[k % 256 / 16], by[1] = block[k % 256 / 16 + 1];
    } else {
      by[0] = by[1] = format.affine(k);
    }
    const auto finite = [](float x) { return (to_bits(x) & 0x7f800000) != 0x7f800000; };
    if (!finite(by[0].times) || !finite(by[0].less) || !finite(by[1].times)) return false;
    Sixteen table;
    if constexpr (Format::kTable) table = sixteen_of<Format>(by[0]);
    for (; k < stop; k += 32, to += 32) {
      const __m256i codes = _mm256_shuffle_epi8(codes_of<kPacking, kBits>(format.line, k), order);
      const __m128i halves[2] = {_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1)};
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const __m128i even = halves[half], odd = _mm_unpackhi_epi64(even, even);
        const auto store = [&](__m128i bytes, float* out) __attribute__((always_inline)) {
          const __m256i index = Format::kSigned ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes);
          if constexpr (Format::kTable) {
            _mm256_store_ps(out, table.at(index));
          } else {
            _mm256_store_ps(out, rounded_to_pairs(Format::number(Format::code_of(index), by[half])));
          }
        };
        store(even, to + 16 * half), store(odd, to + 16 * half + 8);
      }
    }
  }
  return true;
}

// What the plain code gives, in the order of lanes.
inline void widen_plainly(const Quantized& q, int64_t row, int64_t first, int64_t size, float* to) {
  alignas(64) float line[kMostColumns + kUnpackStep];
  unpack_plainly<float, Bf16>(q, row, 1, first, size, 0, line, 0);
  const int64_t all = (size + kUnpackStep - 1) / kUnpackStep * kUnpackStep;
  for (int64_t i = 0; i < all; ++i) to[i / 16 * 16 + i % 2 * 8 + i % 16 / 2] = line[i];
}

template <Packing kPacking, int kBits = 8>
void unpack_wide(const Quantized& q, int64_t row, int64_t rows, int64_t first, int64_t size, int64_t lead, void* to,
                 int64_t to_bytes) {
  const int64_t whole = size / kUnpackStep * kUnpackStep;
  for (int64_t r = 0; r < rows; ++r) {
    auto* const out = reinterpret_cast<float*>(static_cast<char*>(to) + r * to_bytes);
    if (!widen_steps<WideFormat<kPacking, kBits>, kPacking, kBits>(q, row + r, first, whole, lead, out)) {
      widen_plainly(q, row + r, first, size, out);
    } else if (whole < size) {
      widen_plainly(q, row + r, first + whole, size - whole, out + whole);
    }
  }
}

inline void unpack_any(const Quantized& q, int64_t row, int64_t rows, int64_t first, int64_t size, int64_t, void* to,
                       int64_t to_bytes) {
  for (int64_t r = 0; r < rows; ++r)
    widen_plainly(q, row + r, first, size, reinterpret_cast<float*>(static_cast<char*>(to) + r * to_bytes));
}

inline Unpack unpack_wide_of(const Quantized& like) {
  const bool even = in_blocks(like.packing) || like.groups == 1 || like.group % kUnpackStep == 0;
  if (!even || like.order != nullptr || !has_codes(like.packing, like.bits)) return unpack_any;
  switch (like.packing) {
    case Packing::kFp8:
      return unpack_wide<Packing::kFp8>;
    case Packing::kInt8:
      return unpack_wide<Packing::kInt8>;
    case Packing::kPacked:
      return like.bits == 4 ? unpack_wide<Packing::kPacked, 4> : unpack_wide<Packing::kPacked, 8>;
    case Packing::kMx:
      return unpack_wide<Packing::kMx>;
    case Packing::kQ4_0:
      return unpack_wide<Packing::kQ4_0>;
    case Packing::kQ8_0:
      return unpack_wide<Packing::kQ8_0>;
    case Packing::kQ4_K:
      return unpack_wide<Packing::kQ4_K>;
    case Packing::kQ5_K:
      return unpack_wide<Packing::kQ5_K>;
    case Packing::kQ6_K:
      return unpack_wide<Packing::kQ6_K>;
    default:
      return unpack_wide<Packing::kMxBlocks>;
  }
}

}  // namespace
}  // namespace moelight
