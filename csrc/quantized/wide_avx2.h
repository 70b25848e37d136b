// Unpacks quantised matrices for products of bf16 activations (ffn/pairs_avx2.h): numbers rounded to bf16, as floats,
// of each sixteen first the even ones, then the odd ones. Internal linkage.
#pragma once

#include "affine_avx2.h"

namespace moelight {
namespace {

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
  using Wide = WideFormat<Format>;
  const float* const codes = Wide::kSignedZero ? kTwiceE2m1 : kDoubledE2m1;
  __m256 low = _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), high = _mm256_setr_ps(8, 9, 10, 11, 12, 13, 14, 15);
  if constexpr (kE2m1<Format>) low = _mm256_loadu_ps(codes), high = _mm256_loadu_ps(codes + 8);
  return {rounded_to_pairs(Wide::number(low, by)), rounded_to_pairs(Wide::number(high, by))};
}

// A part of a row in whole steps. False, with nothing written to be read, where a number may be none.
template <class Format>
bool widen_steps(const Quantized& q, int64_t row, int64_t first, int64_t size, int64_t lead, float* to) {
  using Wide = WideFormat<Format>;
  const Wide format(q, row);
  const __m256i order = _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15, 0, 2, 4, 6, 8, 10, 12,
                                         14, 1, 3, 5, 7, 9, 11, 13, 15);
  fetch_part(q, format.line, first, size, lead);
  Parts parts;
  for (int64_t k = first, end = first + size; k < end;) {
    const int64_t stop = std::min(end, format.stop(k));
    const std::array<Affine, 2> by = format.affines(k, k == first, parts);
    if (!is_finite(by[0].times) || !is_finite(by[0].less) || !is_finite(by[1].times)) return false;
    Sixteen table;
    if constexpr (Wide::kTable) table = sixteen_of<Format>(by[0]);
    for (; k < stop; k += 32, to += 32) {
      const __m256i codes = _mm256_shuffle_epi8(codes_of(Format(), format.line, k), order);
      const __m128i halves[2] = {_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1)};
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const __m128i even = halves[half], odd = _mm_unpackhi_epi64(even, even);
        const auto store = [&](__m128i bytes, float* out) __attribute__((always_inline)) {
          const __m256i index = kSignedBytes<Format> ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes);
          if constexpr (Wide::kTable) {
            _mm256_store_ps(out, table.at(index));
          } else {
            _mm256_store_ps(out, rounded_to_pairs(Wide::number(Wide::code_of(index), by[half])));
          }
        };
        store(even, to + 16 * half), store(odd, to + 16 * half + 8);
      }
    }
  }
  return true;
}

// The same of blocks of points.
template <class Format>
  requires kHasPoints<Format>
bool widen_steps(const Quantized& q, int64_t row, int64_t first, int64_t size, int64_t lead, float* to) {
  const __m256i signs = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
  const __m256i sign = _mm256_set1_epi32(static_cast<int>(0x80000000));
  fetch_part(q, q.codes + row * q.row_bytes, first, size, lead);
  float scale = 0.0f;
  for (int64_t k = first; k < first + size; k += 16, to += 16) {
    const uint8_t* const p = Format::block_of(q, row, k);
    if (k == first || k % 256 == 0) scale = Format::scale_of(p);
    if (!is_finite(scale)) return false;
    __m256 values[2];
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const Eight from = Format::eight(p, scale, static_cast<int>(k % 256 / 8) + half);
      const __m128i point = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from.point.data()));
      const __m256 shifted = _mm256_add_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(point)), _mm256_set1_ps(from.shift));
      const __m256i turned = _mm256_sllv_epi32(_mm256_set1_epi32(static_cast<int>(from.signs)), signs);
      values[half] = rounded_to_pairs(_mm256_xor_ps(_mm256_mul_ps(_mm256_set1_ps(from.step), shifted),
                                                    _mm256_castsi256_ps(_mm256_and_si256(turned, sign))));
    }
    const auto store = [](__m256 lanes, float* out) {  // two numbers of the first eight, two of the second, and again
      _mm256_store_ps(out, _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(lanes), 0xd8)));
    };
    store(_mm256_shuffle_ps(values[0], values[1], 0x88), to);
    store(_mm256_shuffle_ps(values[0], values[1], 0xdd), to + 8);
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

template <class Format>
void unpack_wide(const Quantized& q, int64_t row, int64_t rows, int64_t first, int64_t size, int64_t lead, void* to,
                 int64_t to_bytes) {
  const int64_t aligned = size / kUnpackStep * kUnpackStep;
  for (int64_t r = 0; r < rows; ++r) {
    auto* const out = reinterpret_cast<float*>(static_cast<char*>(to) + r * to_bytes);
    if (!widen_steps<Format>(q, row + r, first, aligned, lead, out)) {
      widen_plainly(q, row + r, first, size, out);
    } else if (aligned < size) {
      widen_plainly(q, row + r, first + aligned, size - aligned, out + aligned);
    }
  }
}

inline void unpack_any(const Quantized& q, int64_t row, int64_t rows, int64_t first, int64_t size, int64_t, void* to,
                       int64_t to_bytes) {
  for (int64_t r = 0; r < rows; ++r)
    widen_plainly(q, row + r, first, size, reinterpret_cast<float*>(static_cast<char*>(to) + r * to_bytes));
}

inline Unpack unpack_wide_of(const Quantized& like) {
  const bool even = like.groups == 1 || like.group % kUnpackStep == 0;
  return with_format(like, [&](auto format) -> Unpack {
    using Format = decltype(format);
    if constexpr (kHasCodes<Format> || kHasPoints<Format>)
      if (kInBlocks<Format> || even) return unpack_wide<Format>;
    return unpack_any;
  });
}

}  // namespace
}  // namespace moelight
