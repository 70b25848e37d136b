// The codes of quantised matrices as bytes, thirty-two columns of a row at once, for AVX2. Internal linkage.
#pragma once

#include <immintrin.h>

#include "formats.h"

namespace moelight {
namespace {

inline __m256i bytes_at(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline __m128i half_bytes_at(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }

// Codes of two in a byte: the earlier one in the low half, or sixteen in low halves before sixteen in high ones.
inline __m256i paired_nibbles(const uint8_t* p) {
  const __m128i bytes = half_bytes_at(p), mask = _mm_set1_epi8(15);
  const __m128i low = _mm_and_si128(bytes, mask), high = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
  return _mm256_set_m128i(_mm_unpackhi_epi8(low, high), _mm_unpacklo_epi8(low, high));
}
inline __m256i halved_nibbles(const uint8_t* p) {
  const __m128i bytes = half_bytes_at(p), mask = _mm_set1_epi8(15);
  return _mm256_set_m128i(_mm_and_si128(_mm_srli_epi16(bytes, 4), mask), _mm_and_si128(bytes, mask));
}
inline __m256i turned_nibbles(const uint8_t* p) {  // the earlier one in the high half
  const __m128i bytes = half_bytes_at(p), mask = _mm_set1_epi8(15);
  const __m128i low = _mm_and_si128(bytes, mask), high = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
  return _mm256_set_m128i(_mm_unpackhi_epi8(high, low), _mm_unpacklo_epi8(high, low));
}

// Thirty-two codes of a string of bits, the lowest first. Each is a part of two bytes, which a product moves to the
// upper one.
template <int kBits>
struct StringPlaces {
  alignas(32) uint8_t bytes[2][32] = {};
  alignas(32) uint16_t factors[2][16] = {};
  constexpr StringPlaces() {
    constexpr int kBytes = 4 * kBits;
    for (int i = 0; i < 32; ++i) {
      // The second sixteen codes are read from the last sixteen bytes, if there are more than sixteen.
      const int from = i >= 16 && kBytes > 16 ? kBytes - 16 : 0, bit = i * kBits, byte = bit / 8 - from;
      bytes[i / 16][i % 16 * 2] = static_cast<uint8_t>(byte);
      bytes[i / 16][i % 16 * 2 + 1] = static_cast<uint8_t>(byte + 1 < 16 ? byte + 1 : byte);
      factors[i / 16][i % 16] = static_cast<uint16_t>(1 << (8 - bit % 8));
    }
  }
};
template <int kBits>
inline __m256i string_codes(const uint8_t* p) {
  static constexpr StringPlaces<kBits> kPlaces;
  constexpr int kBytes = 4 * kBits;
  __m128i first, last;
  if constexpr (kBytes >= 16) {
    first = half_bytes_at(p), last = half_bytes_at(p + kBytes - 16);
  } else {
    alignas(16) uint8_t all[16] = {};
    std::memcpy(all, p, kBytes);
    first = last = _mm_load_si128(reinterpret_cast<const __m128i*>(all));
  }
  const auto sixteen = [](__m128i bytes, int half) {
    const __m256i places = _mm256_load_si256(reinterpret_cast<const __m256i*>(kPlaces.bytes[half]));
    const __m256i factors = _mm256_load_si256(reinterpret_cast<const __m256i*>(kPlaces.factors[half]));
    const __m256i moved = _mm256_mullo_epi16(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bytes), places), factors);
    return _mm256_and_si256(_mm256_srli_epi16(moved, 8), _mm256_set1_epi16((1 << kBits) - 1));
  };
  return _mm256_permute4x64_epi64(_mm256_packus_epi16(sixteen(first, 0), sixteen(last, 1)), 0xd8);
}

// `bits` of each byte from bit `shift` on.
inline __m256i bits_of(__m256i bytes, int64_t shift, int mask) {
  const __m256i down = _mm256_srl_epi16(bytes, _mm_cvtsi64_si128(shift));
  return _mm256_and_si256(down, _mm256_set1_epi8(static_cast<char>(mask)));
}

// Of thirty-two bits, each as the fifth bit of a byte.
inline __m256i fifth_bits(const uint8_t* p) {
  const __m256i places = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
  const __m256i order = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(word_at(p, 0))), order);
  return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(bytes, places), places), _mm256_set1_epi8(16));
}

// The codes of columns [k, k + 32), k a multiple of 32, as they are stored, of a row that begins at `line`: for formats
// that have them at once.
inline __m256i codes_of(formats::Fp8, const uint8_t* line, int64_t k) { return bytes_at(line + k); }
inline __m256i codes_of(formats::Int8, const uint8_t* line, int64_t k) { return bytes_at(line + k); }
inline __m256i codes_of(formats::Packed<8>, const uint8_t* line, int64_t k) { return bytes_at(line + k); }
inline __m256i codes_of(formats::Packed<4>, const uint8_t* line, int64_t k) { return paired_nibbles(line + k / 2); }
inline __m256i codes_of(formats::Mxfp4, const uint8_t* line, int64_t k) { return paired_nibbles(line + k / 2); }
inline __m256i codes_of(formats::Q4_0, const uint8_t* line, int64_t k) {
  return halved_nibbles(line + k / 32 * 18 + 2);
}
inline __m256i codes_of(formats::Q4_1, const uint8_t* line, int64_t k) {
  return halved_nibbles(line + k / 32 * 20 + 4);
}
inline __m256i codes_of(formats::Q5_0, const uint8_t* line, int64_t k) {
  const uint8_t* const p = line + k / 32 * 22 + 2;
  return _mm256_or_si256(halved_nibbles(p + 4), fifth_bits(p));
}
inline __m256i codes_of(formats::Q5_1, const uint8_t* line, int64_t k) {
  const uint8_t* const p = line + k / 32 * 24 + 4;
  return _mm256_or_si256(halved_nibbles(p + 4), fifth_bits(p));
}
inline __m256i codes_of(formats::Mxfp4Blocks, const uint8_t* line, int64_t k) {
  return halved_nibbles(line + k / 32 * 17 + 1);
}
inline __m256i codes_of(formats::Q8_0, const uint8_t* line, int64_t k) { return bytes_at(line + k / 32 * 34 + 2); }
inline __m256i codes_of(formats::Q4K, const uint8_t* line, int64_t k) {
  const int64_t i = k % 256;
  return bits_of(bytes_at(line + k / 256 * 144 + 16 + i / 64 * 32), i % 64 / 32 * 4, 15);
}
inline __m256i codes_of(formats::Q5K, const uint8_t* line, int64_t k) {
  const int64_t i = k % 256;
  const uint8_t* const p = line + k / 256 * 176;
  const __m256i low = bits_of(bytes_at(p + 48 + i / 64 * 32), i % 64 / 32 * 4, 15);
  return _mm256_or_si256(low, _mm256_slli_epi16(bits_of(bytes_at(p + 16), i / 32, 1), 4));
}
inline __m256i codes_of(formats::Q6K, const uint8_t* line, int64_t k) {
  const int64_t i = k % 256;
  const uint8_t* const p = line + k / 256 * 210;
  const __m256i low = bits_of(bytes_at(p + i / 128 * 64 + i % 64), i % 128 / 64 * 4, 15);
  const __m256i high = bits_of(bytes_at(p + 128 + i / 128 * 32), i % 128 / 32 * 2, 3);
  return _mm256_or_si256(low, _mm256_slli_epi16(high, 4));
}

inline __m256i codes_of(formats::Q2K, const uint8_t* line, int64_t k) {
  const int64_t i = k % 256;
  return bits_of(bytes_at(line + k / 256 * 84 + 16 + i / 128 * 32), i % 128 / 32 * 2, 3);
}
inline __m256i codes_of(formats::Q3K, const uint8_t* line, int64_t k) {
  const int64_t i = k % 256;
  const uint8_t* const p = line + k / 256 * 110;
  const __m256i low = bits_of(bytes_at(p + 32 + i / 128 * 32), i % 128 / 32 * 2, 3);
  return _mm256_or_si256(low, _mm256_slli_epi16(bits_of(bytes_at(p), i / 32, 1), 2));
}
inline __m256i codes_of(formats::Iq4Nl, const uint8_t* line, int64_t k) {
  return halved_nibbles(line + k / 32 * 18 + 2);
}
inline __m256i codes_of(formats::Iq4Xs, const uint8_t* line, int64_t k) {
  return halved_nibbles(line + k / 256 * 136 + 8 + k % 256 / 32 * 16);
}
inline __m256i codes_of(formats::Tq2_0, const uint8_t* line, int64_t k) {
  const int64_t i = k % 256;
  return bits_of(bytes_at(line + k / 256 * 66 + i / 128 * 32), i % 128 / 32 * 2, 3);
}
template <bool kDivides>
inline __m256i codes_of(formats::Nvfp4<kDivides>, const uint8_t* line, int64_t k) {
  return paired_nibbles(line + k / 2);
}
template <bool kNormal>
inline __m256i codes_of(formats::BitsAndBytes<kNormal>, const uint8_t* line, int64_t k) {
  return turned_nibbles(line + k / 2);
}
template <int kBits>
inline __m256i codes_of(formats::Mlx<kBits>, const uint8_t* line, int64_t k) {
  if constexpr (kBits == 8) {
    return bytes_at(line + k);
  } else if constexpr (kBits == 4) {
    return paired_nibbles(line + k / 2);
  } else {
    return string_codes<kBits>(line + k / 8 * kBits);
  }
}

template <class Format>
constexpr bool kHasCodes = requires(const uint8_t* line) { codes_of(Format(), line, 0); };
// Codes are signed bytes.
template <class Format>
constexpr bool kSignedBytes = std::is_same_v<Format, formats::Int8> || std::is_same_v<Format, formats::Q8_0>;

}  // namespace
}  // namespace moelight
