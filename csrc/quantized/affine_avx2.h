// The numbers of codes that are stored together, eight at once, for AVX2. Internal linkage.
#pragma once

#include <array>

#include "codes_avx2.h"
#include "unpack.h"

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

// What a block of thirty-two codes begins with, for the types of which it is the scale, or scale and minimum.
inline float fast_half_at(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
}
inline Affine affine_in(formats::Q4_0, const uint8_t* p) { return {8.0f, fast_half_at(p)}; }
inline Affine affine_in(formats::Q4_1, const uint8_t* p) { return {-fast_half_at(p + 2), fast_half_at(p)}; }
inline Affine affine_in(formats::Q5_0, const uint8_t* p) { return {16.0f, fast_half_at(p)}; }
inline Affine affine_in(formats::Q5_1, const uint8_t* p) { return {-fast_half_at(p + 2), fast_half_at(p)}; }
inline Affine affine_in(formats::Q8_0, const uint8_t* p) { return {0.0f, fast_half_at(p)}; }

// Of the parts of a block of 256 codes: steps of each sixteen, and what is taken off each thirty-two.
struct Parts {
  alignas(32) float times[16], less[8];
};

// Q4_K and Q5_K: eight scales and eight minima of six bits.
template <class Format>
  requires(Format::kLeast)
inline void parts_of(const uint8_t* p, Parts& to) {
  uint32_t low, middle, high;
  std::memcpy(&low, p + 4, 4), std::memcpy(&middle, p + 8, 4), std::memcpy(&high, p + 12, 4);
  const uint32_t scales[2] = {low & 0x3f3f3f3f, (high & 0x0f0f0f0f) | ((low >> 2) & 0x30303030)};
  const uint32_t minima[2] = {middle & 0x3f3f3f3f, ((high >> 4) & 0x0f0f0f0f) | ((middle >> 2) & 0x30303030)};
  const auto floats = [](const uint32_t (&bytes)[2]) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes))));
  };
  const __m256 steps = _mm256_mul_ps(_mm256_set1_ps(fast_half_at(p)), floats(scales));
  const __m256 low_half = _mm256_unpacklo_ps(steps, steps), high_half = _mm256_unpackhi_ps(steps, steps);
  _mm256_store_ps(to.times, _mm256_permute2f128_ps(low_half, high_half, 0x20));
  _mm256_store_ps(to.times + 8, _mm256_permute2f128_ps(low_half, high_half, 0x31));
  _mm256_store_ps(to.less, _mm256_mul_ps(_mm256_set1_ps(fast_half_at(p + 2)), floats(minima)));
}
// Q6_K: sixteen scales of eight bits.
template <class Format>
inline void parts_of(const uint8_t* p, Parts& to) {
  const __m256 scale = _mm256_set1_ps(fast_half_at(p + 208));
  for (int i = 0; i < 16; i += 8) {
    const __m128i steps = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 192 + i));
    _mm256_store_ps(to.times + i, _mm256_mul_ps(scale, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(steps))));
  }
  _mm256_store_ps(to.less, _mm256_set1_ps(32.0f));
}

template <class Format>
struct WideFormat {
  static constexpr bool kFloats = std::is_same_v<Format, formats::Fp8>;
  static constexpr bool kSignedZero = std::is_same_v<Format, formats::Mxfp4>;  // ggml has none
  // Sixteen numbers, which are looked up.
  static constexpr bool kTable = kE2m1<Format> || std::is_same_v<Format, formats::Packed<4>> ||
                                 std::is_same_v<Format, formats::Q4_0> || std::is_same_v<Format, formats::Q4_1> ||
                                 std::is_same_v<Format, formats::Q4K>;

  const Quantized& q;
  int64_t row;
  const uint8_t* line;
  WideFormat(const Quantized& q, int64_t row) : q(q), row(row), line(q.codes + row * q.row_bytes) {}

  // The column behind those that share what column k has.
  int64_t stop(int64_t k) const {
    if (kInBlocks<Format> || kE2m1<Format>) return k + 32;
    return q.groups == 1 ? q.columns : (k / q.group + 1) * q.group;
  }

  Affine affine(int64_t k) const {
    if constexpr (requires { affine_in(Format(), line); }) {
      return affine_in(Format(), Format::block_of(q, row, k));
    } else if constexpr (requires { Format::line(q, row, 0); }) {
      const Line by = Format::line(q, row, k / q.group);
      return {by.zero, by.scale};
    } else {
      const IntegerLine by = Format::integer_line(q, row, k);
      return {kE2m1<Format> || kSignedBytes<Format> ? 0.0f : static_cast<float>(by.zero), by.scale};
    }
  }

  // Of columns [k, k + 32), by halves. `parts` are read anew where a block begins, and at the first column of a part.
  std::array<Affine, 2> affines(int64_t k, bool first, Parts& parts) const {
    if constexpr (kParted<Format>) {
      if (first || k % 256 == 0) parts_of<Format>(Format::block_of(q, row, k), parts);
      const int64_t part = k % 256 / 16;
      return {{{parts.less[part / 2], parts.times[part]}, {parts.less[part / 2], parts.times[part + 1]}}};
    } else {
      const Affine both_halves = affine(k);
      return {{both_halves, both_halves}};
    }
  }

  static __m256 number(__m256 code, const Affine& by) {
    const __m256 less = _mm256_set1_ps(by.less), times = _mm256_set1_ps(by.times);
    if constexpr (requires { Format::kLeast; })
      if constexpr (Format::kLeast) return _mm256_sub_ps(_mm256_mul_ps(times, code), less);
    return _mm256_mul_ps(_mm256_sub_ps(code, less), times);
  }

  static __m256 code_of(__m256i codes) {
    if constexpr (!kFloats) return _mm256_cvtepi32_ps(codes);
    const __m256i magnitude = _mm256_and_si256(codes, _mm256_set1_epi32(0x7f));
    const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(codes, _mm256_set1_epi32(0x80)), 24);
    const __m256 value = _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(magnitude, 20)),
                                       _mm256_castsi256_ps(_mm256_set1_epi32(0x7b800000)));
    const __m256i none = _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7f));
    const __m256i finite = _mm256_blendv_epi8(_mm256_castps_si256(value), _mm256_set1_epi32(0x7fc00000), none);
    return _mm256_castsi256_ps(_mm256_or_si256(finite, sign));
  }
};

inline bool is_finite(float x) { return (to_bits(x) & 0x7f800000) != 0x7f800000; }

// Asks memory for what lies `lead` bytes after the codes of a part of a row.
inline void fetch_part(const Quantized& q, const uint8_t* line, int64_t first, int64_t size, int64_t lead) {
  const int64_t ahead = q.row_bytes * first / q.columns + lead;
  for (int64_t i = 0; lead != 0 && i < q.row_bytes * size / q.columns; i += 64)
    _mm_prefetch(reinterpret_cast<const char*>(line) + ahead + i, _MM_HINT_T1);
}

}  // namespace
}  // namespace moelight
