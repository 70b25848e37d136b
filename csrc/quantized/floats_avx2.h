// Unpacks quantised matrices to floats in the order of columns, for products of float32 and float16 activations by AVX2
// (ffn/kernel.inl). Internal linkage.
#pragma once

#include "affine_avx2.h"

namespace moelight {
namespace {

// Rounded to R, as a float.
template <class R>
inline __m256 rounded_to(__m256 x) {
  if constexpr (std::is_same_v<R, Bf16>) return rounded_to_pairs(x);
  if constexpr (std::is_same_v<R, Fp16>) return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  return x;
}

// A part of a row in whole steps. False, with nothing written to be read, where a number may be none that rounds so.
template <class Format, class R>
bool floats_of_steps(const Quantized& q, int64_t row, int64_t first, int64_t size, int64_t lead, float* to) {
  using Wide = WideFormat<Format>;
  const Wide format(q, row);
  fetch_part(q, format.line, first, size, lead);
  Parts parts;
  for (int64_t k = first, end = first + size; k < end;) {
    const int64_t stop = std::min(end, format.stop(k));
    const std::array<Affine, 2> by = format.affines(k, k == first, parts);
    if constexpr (!std::is_same_v<R, float>)
      if (!is_finite(by[0].times) || !is_finite(by[0].less) || !is_finite(by[1].times)) return false;
    for (; k < stop; k += 32, to += 32) {
      const __m256i codes = codes_of(Format(), format.line, k);
      const __m128i halves[2] = {_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1)};
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const __m128i bytes = i % 2 == 0 ? halves[i / 2] : _mm_unpackhi_epi64(halves[i / 2], halves[i / 2]);
        const __m256i index = kSignedBytes<Format> ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes);
        __m256 code = Wide::code_of(index);
        if constexpr (kE2m1<Format>) {
          const float* const values = Wide::kSignedZero ? kTwiceE2m1 : kDoubledE2m1;
          const __m256 second = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
          code = _mm256_blendv_ps(_mm256_permutevar8x32_ps(_mm256_loadu_ps(values), index),
                                  _mm256_permutevar8x32_ps(_mm256_loadu_ps(values + 8), index), second);
        }
        _mm256_storeu_ps(to + 8 * i, rounded_to<R>(Wide::number(code, by[i / 2])));
      }
    }
  }
  return true;
}

// The same of blocks of points.
template <class Format, class R>
  requires kHasPoints<Format>
bool floats_of_steps(const Quantized& q, int64_t row, int64_t first, int64_t size, int64_t lead, float* to) {
  const __m256i signs = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
  const __m256i sign = _mm256_set1_epi32(static_cast<int>(0x80000000));
  fetch_part(q, q.codes + row * q.row_bytes, first, size, lead);
  float scale = 0.0f;
  for (int64_t k = first; k < first + size; k += 8, to += 8) {
    const uint8_t* const p = Format::block_of(q, row, k);
    if (k == first || k % 256 == 0) scale = Format::scale_of(p);
    if constexpr (!std::is_same_v<R, float>)
      if (!is_finite(scale)) return false;
    const Eight from = Format::eight(p, scale, static_cast<int>(k % 256 / 8));
    const __m128i point = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from.point.data()));
    const __m256 shifted = _mm256_add_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(point)), _mm256_set1_ps(from.shift));
    const __m256i turned = _mm256_sllv_epi32(_mm256_set1_epi32(static_cast<int>(from.signs)), signs);
    _mm256_storeu_ps(to, rounded_to<R>(_mm256_xor_ps(_mm256_mul_ps(_mm256_set1_ps(from.step), shifted),
                                                     _mm256_castsi256_ps(_mm256_and_si256(turned, sign)))));
  }
  return true;
}

template <class Format, class R>
void unpack_floats(const Quantized& q, int64_t row, int64_t rows, int64_t first, int64_t size, int64_t lead, void* to,
                   int64_t to_bytes) {
  const int64_t stepped = size / kUnpackStep * kUnpackStep;
  for (int64_t r = 0; r < rows; ++r) {
    auto* const out = reinterpret_cast<float*>(static_cast<char*>(to) + r * to_bytes);
    if (!floats_of_steps<Format, R>(q, row + r, first, stepped, lead, out)) {
      unpack_plainly<float, R>(q, row + r, 1, first, size, 0, out, 0);
    } else if (stepped < size) {
      unpack_plainly<float, R>(q, row + r, 1, first + stepped, size - stepped, 0, out + stepped, 0);
    }
  }
}

// The Unpack of matrices like this one to floats, rounded to R before.
template <class R>
inline Unpack unpack_floats_of(const Quantized& like) {
  const bool even = like.groups == 1 || like.group % kUnpackStep == 0;
  return with_format(like, [&](auto format) -> Unpack {
    using Format = decltype(format);
    if constexpr (kHasCodes<Format> || kHasPoints<Format>)
      if (kInBlocks<Format> || even) return unpack_floats<Format, R>;
    return unpack_plainly<float, R>;
  });
}

}  // namespace
}  // namespace moelight
