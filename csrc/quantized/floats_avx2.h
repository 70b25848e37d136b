// Unpacks quantised matrices to floats in the order of columns, for products of float32 and float16 activations by AVX2
// (ffn/kernel.inl). Internal linkage.
#pragma once

#include "affine_avx2.h"

namespace moelight {
namespace {

// Rounded to R, as a float.
template <class R>
inline __m256 rounded_to(__m256 x) {
  if constexpr (std::is_same_v<R, Bf16>) return rounded_to_bf16(x);
  if constexpr (std::is_same_v<R, Fp16>) return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  return x;
}

// The numbers of codes of four bits as they are, signs of zeros included; null for others.
template <class Format>
constexpr const float* kSixteen = std::is_same_v<Format, formats::Mxfp4>         ? kTwiceE2m1
                                  : std::is_same_v<Format, formats::Mxfp4Blocks> ? kDoubledE2m1
                                  : kBySixteen<Format>                           ? kTwiceE2m1
                                                                                 : kCodeValues<Format>;

// Eight numbers E4M3, none among them.
inline __m256 floats_of_e4m3(__m256i codes) {
  const __m256i magnitude = _mm256_and_si256(codes, _mm256_set1_epi32(0x7f));
  const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(codes, _mm256_set1_epi32(0x80)), 24);
  const __m256 value = _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(magnitude, 20)),
                                     _mm256_castsi256_ps(_mm256_set1_epi32(0x7b800000)));
  const __m256i none = _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7f));
  const __m256i finite = _mm256_blendv_epi8(_mm256_castps_si256(value), _mm256_set1_epi32(0x7fc00000), none);
  return _mm256_castsi256_ps(_mm256_or_si256(finite, sign));
}

// Eight codes, of the lowest eight bytes, as the numbers that scales are for.
template <class Format>
inline __m256 code_numbers(__m128i bytes) {
  if constexpr (std::is_same_v<Format, formats::Fp8>) return floats_of_e4m3(_mm256_cvtepu8_epi32(bytes));
  if constexpr (kSixteen<Format> == nullptr) return floats_of_bytes<kSignedCodes<Format>>(bytes);
  const __m256i index = _mm256_cvtepu8_epi32(bytes);
  const __m256 second = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
  return _mm256_blendv_ps(_mm256_permutevar8x32_ps(_mm256_loadu_ps(kSixteen<Format>), index),
                          _mm256_permutevar8x32_ps(_mm256_loadu_ps(kSixteen<Format> + 8), index), second);
}

// A part of a row in whole steps, at most kAffineColumns. False, with nothing written to be read, where a number may be
// none that rounds so.
template <class Format, class R>
bool floats_of_steps(const Quantized& q, int64_t row, int64_t first, int64_t size, float* to) {
  const uint8_t* const line = q.codes + row * q.row_bytes;
  const int64_t base = first / 256 * 256;
  Affines by;
  affines_of<Format>(q, row, first, size, affine_group<Format>(q, first), by);
  if constexpr (!std::is_same_v<R, float>)
    if (!are_bounded<Format>(by, first, size)) return false;
  for (int64_t k = first; k < first + size; k += 32, to += 32) {
    const __m256i codes = kSixteen<Format> != nullptr ? codes_of(Format(), line, k) : number_codes<Format>(line, k);
    const __m128i halves[2] = {_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1)};
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m128i bytes = i % 2 == 0 ? halves[i / 2] : _mm_unpackhi_epi64(halves[i / 2], halves[i / 2]);
      const int64_t at = (k - base) / 16 + i / 2;
      const __m256 number =
          number_of<Format>(code_numbers<Format>(bytes), _mm256_broadcast_ss(by.times + at), by.less + at);
      _mm256_storeu_ps(to + 8 * i, rounded_to<R>(number));
    }
  }
  return true;
}

template <class Format, class R>
void unpack_floats(const Quantized& q, int64_t row, int64_t rows, int64_t first, int64_t size, int64_t lead, void* to,
                   int64_t to_bytes) {
  const int64_t stepped = size / kUnpackStep * kUnpackStep;
  for (int64_t r = 0; r < rows; ++r) {
    auto* const out = reinterpret_cast<float*>(static_cast<char*>(to) + r * to_bytes);
    fetch_part<Format>(q.codes + (row + r) * q.row_bytes, first, size, lead);
    for (int64_t k = 0; k < stepped; k += kAffineColumns) {
      const int64_t some = std::min(kAffineColumns, stepped - k);
      if (!floats_of_steps<Format, R>(q, row + r, first + k, some, out + k))
        unpack_plainly<float, R>(q, row + r, 1, first + k, some, 0, out + k, 0);
    }
    if (stepped < size) unpack_plainly<float, R>(q, row + r, 1, first + stepped, size - stepped, 0, out + stepped, 0);
  }
}

// The Unpack of matrices like this one to floats, rounded to R before.
template <class R>
inline Unpack unpack_floats_of(const Quantized& like) {
  const bool even = like.groups == 1 || like.group % kUnpackStep == 0;
  return with_format(like, [&](auto format) -> Unpack {
    using Format = decltype(format);
    if constexpr (kHasCodes<Format>)
      if (kInBlocks<Format> || kBySixteen<Format> || even) return unpack_floats<Format, R>;
    return unpack_plainly<float, R>;
  });
}

}  // namespace
}  // namespace moelight
