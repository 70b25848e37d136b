// The codes of quantised matrices as bytes, thirty-two columns of a row at once, for AVX2. Internal linkage.
#pragma once

#include <immintrin.h>

#include "numbers.h"

namespace moelight {
namespace {

inline __m256i bytes_at(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline __m128i half_bytes_at(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }

// Codes of two in a byte: the earlier one in the low half, or sixteen in low halves before sixteen in high ones.
inline __m256i paired_nibbles(const uint8_t* p) {
  const __m128i both = half_bytes_at(p), mask = _mm_set1_epi8(15);
  const __m128i low = _mm_and_si128(both, mask), high = _mm_and_si128(_mm_srli_epi16(both, 4), mask);
  return _mm256_set_m128i(_mm_unpackhi_epi8(low, high), _mm_unpacklo_epi8(low, high));
}
inline __m256i halved_nibbles(const uint8_t* p) {
  const __m128i both = half_bytes_at(p), mask = _mm_set1_epi8(15);
  return _mm256_set_m128i(_mm_and_si128(_mm_srli_epi16(both, 4), mask), _mm_and_si128(both, mask));
}
// `bits` of each byte from bit `shift` on.
inline __m256i bits_of(__m256i bytes, int64_t shift, int mask) {
  const __m256i down = _mm256_srl_epi16(bytes, _mm_cvtsi64_si128(shift));
  return _mm256_and_si256(down, _mm256_set1_epi8(static_cast<char>(mask)));
}

// Formats whose codes of thirty-two columns can be had at once.
constexpr bool has_codes(Packing packing, int bits) {
  switch (packing) {
    case Packing::kPacked:
      return bits == 4 || bits == 8;
    case Packing::kFp8:
    case Packing::kInt8:
    case Packing::kMx:
    case Packing::kQ4_0:
    case Packing::kQ8_0:
    case Packing::kQ4_K:
    case Packing::kQ5_K:
    case Packing::kQ6_K:
    case Packing::kMxBlocks:
      return true;
    default:
      return false;
  }
}

// The codes of columns [k, k + 32), k a multiple of 32, as they are stored, of a row that begins at `line`.
template <Packing kPacking, int kBits>
inline __m256i codes_of(const uint8_t* line, int64_t k) {
  const int64_t i = k % 256;
  switch (kPacking) {
    case Packing::kPacked:
      return kBits == 4 ? paired_nibbles(line + k / 2) : bytes_at(line + k);
    case Packing::kMx:
      return paired_nibbles(line + k / 2);
    case Packing::kQ4_0:
      return halved_nibbles(line + k / 32 * 18 + 2);
    case Packing::kMxBlocks:
      return halved_nibbles(line + k / 32 * 17 + 1);
    case Packing::kQ8_0:
      return bytes_at(line + k / 32 * 34 + 2);
    case Packing::kQ4_K:
      return bits_of(bytes_at(line + k / 256 * 144 + 16 + i / 64 * 32), i % 64 / 32 * 4, 15);
    case Packing::kQ5_K: {
      const uint8_t* const p = line + k / 256 * 176;
      const __m256i low = bits_of(bytes_at(p + 48 + i / 64 * 32), i % 64 / 32 * 4, 15);
      return _mm256_or_si256(low, _mm256_slli_epi16(bits_of(bytes_at(p + 16), i / 32, 1), 4));
    }
    case Packing::kQ6_K: {
      const uint8_t* const p = line + k / 256 * 210;
      const __m256i low = bits_of(bytes_at(p + i / 128 * 64 + i % 64), i % 128 / 64 * 4, 15);
      const __m256i high = bits_of(bytes_at(p + 128 + i / 128 * 32), i % 128 / 32 * 2, 3);
      return _mm256_or_si256(low, _mm256_slli_epi16(high, 4));
    }
    default:
      return bytes_at(line + k);
  }
}

}  // namespace
}  // namespace moelight
