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

// Of thirty-two bits a byte each, all of whose bits it is.
inline __m256i bit_masks(const uint8_t* p) {
  const __m256i places = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
  const __m256i order = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(word_at(p, 0))), order);
  return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, places), places);
}
// The same, as the fifth bit of a byte.
inline __m256i fifth_bits(const uint8_t* p) { return _mm256_and_si256(bit_masks(p), _mm256_set1_epi8(16)); }

// The codes of columns [k, k + 32), k a multiple of 32, as they are stored, of a row that begins at `line`: for formats
// that have them at once. Columns are unsigned, so that places within a block are shifts and masks.
inline __m256i codes_of(formats::Fp8, const uint8_t* line, uint64_t k) { return bytes_at(line + k); }
inline __m256i codes_of(formats::Int8, const uint8_t* line, uint64_t k) { return bytes_at(line + k); }
inline __m256i codes_of(formats::Packed<8>, const uint8_t* line, uint64_t k) { return bytes_at(line + k); }
inline __m256i codes_of(formats::Packed<4>, const uint8_t* line, uint64_t k) { return paired_nibbles(line + k / 2); }
inline __m256i codes_of(formats::Mxfp4, const uint8_t* line, uint64_t k) { return paired_nibbles(line + k / 2); }
inline __m256i codes_of(formats::Q4_0, const uint8_t* line, uint64_t k) {
  return halved_nibbles(line + k / 32 * 18 + 2);
}
inline __m256i codes_of(formats::Q4_1, const uint8_t* line, uint64_t k) {
  return halved_nibbles(line + k / 32 * 20 + 4);
}
inline __m256i codes_of(formats::Q5_0, const uint8_t* line, uint64_t k) {
  const uint8_t* const p = line + k / 32 * 22 + 2;
  return _mm256_or_si256(halved_nibbles(p + 4), fifth_bits(p));
}
inline __m256i codes_of(formats::Q5_1, const uint8_t* line, uint64_t k) {
  const uint8_t* const p = line + k / 32 * 24 + 4;
  return _mm256_or_si256(halved_nibbles(p + 4), fifth_bits(p));
}
inline __m256i codes_of(formats::Mxfp4Blocks, const uint8_t* line, uint64_t k) {
  return halved_nibbles(line + k / 32 * 17 + 1);
}
inline __m256i codes_of(formats::Q8_0, const uint8_t* line, uint64_t k) { return bytes_at(line + k / 32 * 34 + 2); }
inline __m256i codes_of(formats::Q4K, const uint8_t* line, uint64_t k) {
  const uint64_t i = k % 256;
  return bits_of(bytes_at(line + k / 256 * 144 + 16 + i / 64 * 32), i % 64 / 32 * 4, 15);
}
inline __m256i codes_of(formats::Q5K, const uint8_t* line, uint64_t k) {
  const uint64_t i = k % 256;
  const uint8_t* const p = line + k / 256 * 176;
  const __m256i low = bits_of(bytes_at(p + 48 + i / 64 * 32), i % 64 / 32 * 4, 15);
  return _mm256_or_si256(low, _mm256_slli_epi16(bits_of(bytes_at(p + 16), i / 32, 1), 4));
}
inline __m256i codes_of(formats::Q6K, const uint8_t* line, uint64_t k) {
  const uint64_t i = k % 256;
  const uint8_t* const p = line + k / 256 * 210;
  const __m256i low = bits_of(bytes_at(p + i / 128 * 64 + i % 64), i % 128 / 64 * 4, 15);
  const __m256i high = bits_of(bytes_at(p + 128 + i / 128 * 32), i % 128 / 32 * 2, 3);
  return _mm256_or_si256(low, _mm256_slli_epi16(high, 4));
}

inline __m256i codes_of(formats::Q2K, const uint8_t* line, uint64_t k) {
  const uint64_t i = k % 256;
  return bits_of(bytes_at(line + k / 256 * 84 + 16 + i / 128 * 32), i % 128 / 32 * 2, 3);
}
inline __m256i codes_of(formats::Q3K, const uint8_t* line, uint64_t k) {
  const uint64_t i = k % 256;
  const uint8_t* const p = line + k / 256 * 110;
  const __m256i low = bits_of(bytes_at(p + 32 + i / 128 * 32), i % 128 / 32 * 2, 3);
  return _mm256_or_si256(low, _mm256_slli_epi16(bits_of(bytes_at(p), i / 32, 1), 2));
}
inline __m256i codes_of(formats::Iq4Nl, const uint8_t* line, uint64_t k) {
  return halved_nibbles(line + k / 32 * 18 + 2);
}
inline __m256i codes_of(formats::Iq4Xs, const uint8_t* line, uint64_t k) {
  return halved_nibbles(line + k / 256 * 136 + 8 + k % 256 / 32 * 16);
}
inline __m256i codes_of(formats::Tq2_0, const uint8_t* line, uint64_t k) {
  const uint64_t i = k % 256;
  return bits_of(bytes_at(line + k / 256 * 66 + i / 128 * 32), i % 128 / 32 * 2, 3);
}
template <bool kDivides>
inline __m256i codes_of(formats::Nvfp4<kDivides>, const uint8_t* line, uint64_t k) {
  return paired_nibbles(line + k / 2);
}
template <bool kNormal>
inline __m256i codes_of(formats::BitsAndBytes<kNormal>, const uint8_t* line, uint64_t k) {
  return turned_nibbles(line + k / 2);
}
template <int kBits>
inline __m256i codes_of(formats::Mlx<kBits>, const uint8_t* line, uint64_t k) {
  if constexpr (kBits == 8) {
    return bytes_at(line + k);
  } else if constexpr (kBits == 4) {
    return paired_nibbles(line + k / 2);
  } else {
    return string_codes<kBits>(line + k / 8 * kBits);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Codes that are indices of a codebook: whole points are loaded at once.

// Thirty-two values as magnitudes and numbers of the same sign, none of which is zero.
struct SignedPoints {
  __m256i magnitudes, signs;
  // As negative numbers have all bits of their byte of `masks` set, and others none.
  static SignedPoints of(__m256i magnitudes, __m256i masks) {
    return {magnitudes, _mm256_or_si256(masks, _mm256_set1_epi8(1))};
  }
};

// Masks of eight signs, of which an even number is negative, by the first seven.
struct EvenSigns {
  alignas(64) uint64_t masks[128] = {};
  constexpr EvenSigns() {
    for (uint32_t seven = 0; seven < 128; ++seven)
      for (uint32_t bit = 0; bit < 8; ++bit)
        if (even_signs(seven) >> bit & 1) masks[seven] |= uint64_t{255} << (8 * bit);
  }
};
inline constexpr EvenSigns kEvenSigns;

inline int64_t eight_at(const std::array<int8_t, 8>& point) {
  int64_t bytes;
  std::memcpy(&bytes, point.data(), sizeof bytes);
  return bytes;
}
inline int four_at(const std::array<int8_t, 4>& point) {
  int bytes;
  std::memcpy(&bytes, point.data(), sizeof bytes);
  return bytes;
}
// of(0) to of(3), beside each other.
template <class F>
inline __attribute__((always_inline)) __m256i four_longs(F&& of) {
  return _mm256_setr_epi64x(static_cast<long long>(of(0)), static_cast<long long>(of(1)), static_cast<long long>(of(2)),
                            static_cast<long long>(of(3)));
}
template <class F>
inline __attribute__((always_inline)) __m256i eight_words(F&& of) {
  return _mm256_setr_epi32(of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7));
}
// Four fields of seven bits.
inline __m256i even_masks(uint32_t packed) {
  return four_longs([packed](int i) { return kEvenSigns.masks[packed >> (7 * i) & 127]; });
}

inline SignedPoints points_of(formats::Iq2Xxs, const uint8_t* line, uint64_t k) {
  const uint8_t* const part = line + k / 256 * 66 + 2 + k % 256 / 4;
  const uint32_t index = word_at(part, 0);
  return SignedPoints::of(four_longs([index](int i) { return eight_at(codebooks::kIq2Xxs[index >> (8 * i) & 255]); }),
                          even_masks(word_at(part, 1)));
}
inline SignedPoints points_of(formats::Iq2Xs, const uint8_t* line, uint64_t k) {
  uint64_t codes;
  std::memcpy(&codes, line + k / 256 * 74 + 2 + k % 256 / 4, sizeof codes);
  return SignedPoints::of(four_longs([codes](int i) { return eight_at(codebooks::kIq2Xs[codes >> (16 * i) & 511]); }),
                          four_longs([codes](int i) { return kEvenSigns.masks[codes >> (16 * i + 9) & 127]; }));
}
inline SignedPoints points_of(formats::Iq2S, const uint8_t* line, uint64_t k) {
  const uint8_t* const p = line + k / 256 * 82;
  const uint64_t i = k % 256 / 8;
  const uint32_t index = word_at(p + 2 + i, 0), high = p[66 + i / 4];
  const auto point = [&](int j) {
    return eight_at(codebooks::kIq2S[(index >> (8 * j) & 255) | (high >> (2 * j) & 3) << 8]);
  };
  return SignedPoints::of(four_longs(point), bit_masks(p + 34 + i));
}
inline SignedPoints points_of(formats::Iq3Xxs, const uint8_t* line, uint64_t k) {
  const uint8_t* const p = line + k / 256 * 98;
  const uint64_t i = k % 256;
  uint64_t index;
  std::memcpy(&index, p + 2 + i / 4, sizeof index);
  return SignedPoints::of(eight_words([index](int j) { return four_at(codebooks::kIq3Xxs[index >> (8 * j) & 255]); }),
                          even_masks(word_at(p + 66 + i / 8, 0)));
}
inline SignedPoints points_of(formats::Iq3S, const uint8_t* line, uint64_t k) {
  const uint8_t* const p = line + k / 256 * 110;
  const uint64_t i = k % 256;
  uint64_t index;
  std::memcpy(&index, p + 2 + i / 4, sizeof index);
  const uint32_t high = p[66 + i / 32];
  const auto point = [&](int j) { return four_at(codebooks::kIq3S[(index >> (8 * j) & 255) | (high >> j & 1) << 8]); };
  return SignedPoints::of(eight_words(point), bit_masks(p + 74 + i / 8));
}
// Eight times -1, 0 or 1, and what `lower` takes off or adds.
inline SignedPoints moved_points(__m256i points, __m256i shifts) {
  const __m256i eightfold = _mm256_and_si256(_mm256_slli_epi16(points, 3), _mm256_set1_epi8(static_cast<char>(0xf8)));
  const __m256i codes = _mm256_add_epi8(eightfold, shifts);
  return {_mm256_abs_epi8(codes), codes};
}
inline SignedPoints points_of(formats::Iq1S, const uint8_t* line, uint64_t k) {
  const uint8_t* const p = line + k / 256 * 50;
  const uint64_t i = k % 256 / 8;
  const uint32_t index = word_at(p + 2 + i, 0), packed = formats::Iq1S::packed(p, static_cast<int>(i));
  const auto point = [&](int j) {
    return eight_at(codebooks::kIq1[(index >> (8 * j) & 255) | (packed >> (3 * j) & 7) << 8]);
  };
  return moved_points(four_longs(point), _mm256_set1_epi8(packed >> 15 != 0 ? -1 : 1));
}
inline SignedPoints points_of(formats::Iq1M, const uint8_t* line, uint64_t k) {
  const uint8_t* const p = line + k / 256 * 56;
  const uint64_t i = k % 256 / 8;
  const uint32_t index = word_at(p + i, 0), codes = p[32 + i / 2] | p[33 + i / 2] << 8;
  const auto point = [&](int j) {
    return eight_at(codebooks::kIq1[(index >> (8 * j) & 255) | (codes >> (4 * j) & 7) << 8]);
  };
  const auto shift = [&](int j) { return codes >> (4 * j) & 8 ? ~uint64_t{0} : uint64_t{0x0101010101010101}; };
  return moved_points(four_longs(point), four_longs(shift));
}

// As unsigned codes.
template <class Format>
  requires kHasPoints<Format>
inline __m256i codes_of(Format, const uint8_t* line, uint64_t k) {
  const SignedPoints from = points_of(Format(), line, k);
  return _mm256_add_epi8(_mm256_sign_epi8(from.magnitudes, from.signs),
                         _mm256_set1_epi8(static_cast<char>(Format::kZero)));
}

// Codes of four bits that share a byte with the next one, the earlier in the low half.
template <class Format>
constexpr bool kPairedCodes = std::is_same_v<Format, formats::Packed<4>> || std::is_same_v<Format, formats::Mxfp4> ||
                              std::is_same_v<Format, formats::Nvfp4<false>> ||
                              std::is_same_v<Format, formats::Nvfp4<true>> || std::is_same_v<Format, formats::Mlx<4>>;

// Of the thirty-two codes_of the first and the third eight in the lower lane, the others in the upper one: so that what
// lanes unpack are sixteen columns in their order.
template <class Format>
inline __m256i crossed_codes(const uint8_t* line, uint64_t k) {
  if constexpr (kPairedCodes<Format>) {
    const __m256i places = _mm256_setr_epi8(0, -1, 1, -1, 2, -1, 3, -1, 8, -1, 9, -1, 10, -1, 11, -1, 4, -1, 5, -1, 6,
                                            -1, 7, -1, 12, -1, 13, -1, 14, -1, 15, -1);
    const __m256i bytes = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(half_bytes_at(line + k / 2)), places);
    return _mm256_and_si256(_mm256_or_si256(bytes, _mm256_slli_epi16(bytes, 4)), _mm256_set1_epi8(15));
  } else {
    return _mm256_permute4x64_epi64(codes_of(Format(), line, k), 0xd8);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Steps of the sixteen parts of a block, which are signed bytes.

inline __m128i doubled_words(__m128i words) { return _mm_or_si128(words, _mm_slli_epi16(words, 8)); }
inline __m128i odd_steps(__m128i scales) { return _mm_add_epi8(_mm_add_epi8(scales, scales), _mm_set1_epi8(1)); }
// Of eight words, the four upper bits.
inline __m128i upper_steps(__m256i words) {
  const __m256i scales = _mm256_srli_epi32(words, 28);
  return odd_steps(
      doubled_words(_mm_packus_epi32(_mm256_castsi256_si128(scales), _mm256_extracti128_si256(scales, 1))));
}
// Of eight bytes, both halves.
inline __m128i halved_steps(const uint8_t* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), mask = _mm_set1_epi8(15);
  return odd_steps(_mm_unpacklo_epi8(_mm_and_si128(bytes, mask), _mm_and_si128(_mm_srli_epi16(bytes, 4), mask)));
}

inline __m128i part_steps(formats::Q6K, const uint8_t* p) { return half_bytes_at(p + 192); }
inline __m128i part_steps(formats::Iq2Xxs, const uint8_t* p) {  // of words the odd ones
  const __m256 words =
      _mm256_shuffle_ps(_mm256_castsi256_ps(bytes_at(p + 2)), _mm256_castsi256_ps(bytes_at(p + 34)), 0xdd);
  return upper_steps(_mm256_permute4x64_epi64(_mm256_castps_si256(words), 0xd8));
}
inline __m128i part_steps(formats::Iq2Xs, const uint8_t* p) { return halved_steps(p + 66); }
inline __m128i part_steps(formats::Iq2S, const uint8_t* p) { return halved_steps(p + 74); }
inline __m128i part_steps(formats::Iq3Xxs, const uint8_t* p) { return upper_steps(bytes_at(p + 66)); }
inline __m128i part_steps(formats::Iq3S, const uint8_t* p) {
  const __m128i bytes = _mm_cvtsi32_si128(static_cast<int>(word_at(p + 106, 0))), mask = _mm_set1_epi8(15);
  const __m128i halves = _mm_unpacklo_epi8(_mm_and_si128(bytes, mask), _mm_and_si128(_mm_srli_epi16(bytes, 4), mask));
  return odd_steps(_mm_unpacklo_epi8(halves, halves));
}
inline __m128i part_steps(formats::Iq1S, const uint8_t* p) {
  const __m128i scales = _mm_and_si128(_mm_srli_epi16(half_bytes_at(p + 34), 12), _mm_set1_epi16(7));
  return odd_steps(doubled_words(scales));
}
inline __m128i part_steps(formats::Iq1M, const uint8_t* p) {  // four words of four fields of three bits
  const __m128i words = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 48));
  const __m128i twice = _mm_unpacklo_epi16(words, words);
  const __m128i factors = _mm_setr_epi16(1 << 13, 1 << 10, 1 << 7, 1 << 4, 1 << 13, 1 << 10, 1 << 7, 1 << 4);
  const auto fields = [&](__m128i four) { return _mm_srli_epi16(_mm_mullo_epi16(four, factors), 13); };
  const __m128i first = fields(_mm_unpacklo_epi32(twice, twice)), second = fields(_mm_unpackhi_epi32(twice, twice));
  return odd_steps(_mm_packus_epi16(first, second));
}

// Of a block of Q4_K or Q5_K that begins at p: the steps of eight parts, then what is taken off them (KScales). By
// words: the bits of lower parts, and the upper bits of the others.
inline __m128i steps_and_lows(const uint8_t* p) {
  const __m128i head = half_bytes_at(p);
  const __m128i lower = _mm_srlv_epi32(_mm_shuffle_epi32(head, 0xed), _mm_setr_epi32(0, 0, 0, 4));
  const __m128i upper = _mm_srli_epi32(_mm_shuffle_epi32(head, 0x84), 2);
  return _mm_or_si128(_mm_and_si128(lower, _mm_setr_epi32(0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f)),
                      _mm_and_si128(upper, _mm_setr_epi32(0, 0x30303030, 0, 0x30303030)));
}

inline float fast_half_at(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
}

// What steps of parts are times.
inline float scale_of_parts(formats::Q6K, const uint8_t* p) { return fast_half_at(p + 208); }
inline float scale_of_parts(formats::Iq1M, const uint8_t* p) { return formats::Iq1M::scale_of(p) * 0.125f; }
template <class Format>
  requires kHasPoints<Format>
inline float scale_of_parts(Format, const uint8_t* p) {
  return fast_half_at(p) * (Format::kFactor / Format::kFine);
}

// half_power_of of eight numbers.
inline __m256 half_powers_of(__m256i e) {
  const __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
  const __m256i usual = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
  return _mm256_castsi256_ps(_mm256_blendv_epi8(usual, small, _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e)));
}

template <class Format>
constexpr bool kHasCodes = requires(const uint8_t* line) { codes_of(Format(), line, 0); };
// Codes are signed bytes.
template <class Format>
constexpr bool kSignedBytes = std::is_same_v<Format, formats::Int8> || std::is_same_v<Format, formats::Q8_0>;

}  // namespace
}  // namespace moelight
