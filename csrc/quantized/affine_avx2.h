// The numbers of codes that are stored together, for AVX2: what all columns of sixteen have in common, and thirty-two
// codes as bytes. Internal linkage.
#pragma once

#include <array>

#include "codes_avx2.h"
#include "unpack.h"

namespace moelight {
namespace {

// Rounded to bf16.
inline __m256 rounded_to_bf16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  return _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}

// How a number is made of its code: times a scale; the same, less something; or less a zero point, times a scale.
enum class NumberForm { kScaled, kTakenOff, kZeroed };

template <class Format>
constexpr NumberForm kNumberForm = NumberForm::kScaled;
template <>
constexpr NumberForm kNumberForm<formats::Int8> = NumberForm::kZeroed;
template <int kBits>
constexpr NumberForm kNumberForm<formats::Packed<kBits>> = NumberForm::kZeroed;
template <int kBits>
constexpr NumberForm kNumberForm<formats::Mlx<kBits>> = NumberForm::kTakenOff;
template <>
constexpr NumberForm kNumberForm<formats::Q4_1> = NumberForm::kTakenOff;
template <>
constexpr NumberForm kNumberForm<formats::Q5_1> = NumberForm::kTakenOff;
template <>
constexpr NumberForm kNumberForm<formats::Q2K> = NumberForm::kTakenOff;
template <>
constexpr NumberForm kNumberForm<formats::Q4K> = NumberForm::kTakenOff;
template <>
constexpr NumberForm kNumberForm<formats::Q5K> = NumberForm::kTakenOff;

// Sixteen numbers for which codes stand, where these are no whole ones.
template <class Format>
constexpr const float* kCodeValues = nullptr;
template <>
constexpr const float* kCodeValues<formats::BitsAndBytes<true>> = kNf4;
template <>
constexpr const float* kCodeValues<formats::BitsAndBytes<false>> = kFp4;

// Columns have the same scale by sixteen.
template <class Format>
constexpr bool kBySixteen = false;
template <bool kDivides>
constexpr bool kBySixteen<formats::Nvfp4<kDivides>> = true;

// A block of 256 columns has steps of its parts.
template <class Format>
constexpr bool kHasSteps = kParted<Format> || std::is_same_v<Format, formats::Q2K> ||
                           std::is_same_v<Format, formats::Q3K> || std::is_same_v<Format, formats::Iq4Xs>;

// Columns [k, k + 32) have scales of their own, which the codes of other columns do not share.
template <class Format>
constexpr bool kOwnScales = kInBlocks<Format> || kE2m1<Format> || kBySixteen<Format>;

// ---------------------------------------------------------------------------------------------------------------------
// Scales.

// Of sixteen columns.
struct Affine {
  float times, less;
};

// Of a block that has no steps.
inline Affine affine_in(formats::Q4_0, const uint8_t* p) { return {fast_half_at(p), 0.0f}; }
inline Affine affine_in(formats::Q4_1, const uint8_t* p) { return {fast_half_at(p), -fast_half_at(p + 2)}; }
inline Affine affine_in(formats::Iq4Nl, const uint8_t* p) { return {fast_half_at(p), 0.0f}; }
inline Affine affine_in(formats::Q5_0, const uint8_t* p) { return {fast_half_at(p), 0.0f}; }
inline Affine affine_in(formats::Q5_1, const uint8_t* p) { return {fast_half_at(p), -fast_half_at(p + 2)}; }
inline Affine affine_in(formats::Q8_0, const uint8_t* p) { return {fast_half_at(p), 0.0f}; }
inline Affine affine_in(formats::Mxfp4Blocks, const uint8_t* p) { return {half_power_of(p[0]), 0.0f}; }
inline Affine affine_in(formats::Tq2_0, const uint8_t* p) { return {fast_half_at(p + 64), 0.0f}; }

// Of the columns of a group.
template <class Format>
inline Affine affine_of(const Quantized& q, int64_t row, int64_t group) {
  const Line by = Format::line(q, row, group);
  return {by.scale, by.zero};
}
template <class Format>
  requires(kCodeValues<Format> != nullptr)
inline Affine affine_of(const Quantized& q, int64_t row, int64_t group) {
  return {scale_at(q, row * q.groups + group), 0.0f};
}
template <class Format>
  requires(kBySixteen<Format>)
inline Affine affine_of(const Quantized& q, int64_t row, int64_t group) {
  return {0.5f * Format::scale(q, row, group), 0.0f};  // codes are twice their numbers
}
template <class Format>
  requires(kNumberForm<Format> == NumberForm::kTakenOff)
inline Affine affine_of(const Quantized& q, int64_t row, int64_t group) {
  const int64_t at = row * q.groups + group;
  return {scale_at(q, at), -number_at(q.zeros, q.scale_type, at)};
}

// The group of a column, where scales lie beside codes: asked once for many rows, because a division takes long.
template <class Format>
inline int64_t affine_group(const Quantized& q, int64_t column) {
  constexpr int64_t kGroup = Format::kTraits.group;
  return kInBlocks<Format> || q.groups == 1 ? 0 : column / (kGroup != 0 ? kGroup : q.group);
}

// The columns from one on that share a scale, up to `stop`, at most `end`; they are followed by those of `group`.
struct SharedColumns {
  Affine by;
  int64_t stop, group;
};
template <class Format>
inline SharedColumns shared_columns(const Quantized& q, int64_t row, int64_t k, int64_t end, int64_t group) {
  if constexpr (kInBlocks<Format>) {
    return {affine_in(Format(), Format::block_of(q, row, k)), k + 32, 0};
  } else {
    return {affine_of<Format>(q, row, group), q.groups > 1 ? std::min(end, (group + 1) * q.group) : end, group + 1};
  }
}

// Of some columns by sixteen, from a multiple of 256 on.
constexpr int64_t kAffineColumns = 512;
struct Affines {
  static constexpr int64_t kCount = (kAffineColumns + 256) / 16;  // whole vectors are written
  alignas(32) float times[kCount], less[kCount];
};

inline __m256 floats_of_eight(const void* bytes) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(bytes))));
}
// Each of eight twice.
inline void store_doubled(__m256 eight, float* to) {
  const __m256 low_half = _mm256_unpacklo_ps(eight, eight), high_half = _mm256_unpackhi_ps(eight, eight);
  _mm256_store_ps(to, _mm256_permute2f128_ps(low_half, high_half, 0x20));
  _mm256_store_ps(to + 8, _mm256_permute2f128_ps(low_half, high_half, 0x31));
}

// The steps of a block's sixteen parts. Q4_K and Q5_K: eight scales and eight minima of six bits.
template <class Format>
  requires(Format::kLeast)
inline void steps_of(const uint8_t* p, float* times, float* less) {
  uint32_t low, middle, high;
  std::memcpy(&low, p + 4, 4), std::memcpy(&middle, p + 8, 4), std::memcpy(&high, p + 12, 4);
  const uint32_t scales[2] = {low & 0x3f3f3f3f, (high & 0x0f0f0f0f) | ((low >> 2) & 0x30303030)};
  const uint32_t minima[2] = {middle & 0x3f3f3f3f, ((high >> 4) & 0x0f0f0f0f) | ((middle >> 2) & 0x30303030)};
  store_doubled(_mm256_mul_ps(_mm256_set1_ps(fast_half_at(p)), floats_of_eight(scales)), times);
  store_doubled(_mm256_mul_ps(_mm256_set1_ps(fast_half_at(p + 2)), floats_of_eight(minima)), less);
}
inline void store_steps(__m128i signed_bytes, float scale, float* times) {
  const __m256 by = _mm256_set1_ps(scale);
  _mm256_store_ps(times, _mm256_mul_ps(by, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(signed_bytes))));
  const __m128i last = _mm_unpackhi_epi64(signed_bytes, signed_bytes);
  _mm256_store_ps(times + 8, _mm256_mul_ps(by, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(last))));
}
// Q6_K and points: sixteen whole numbers.
template <class Format>
  requires requires(const uint8_t* p) { part_steps(Format(), p); }
inline void steps_of(const uint8_t* p, float* times, float*) {
  store_steps(part_steps(Format(), p), scale_of_parts(Format(), p), times);
}
// Q2_K: sixteen scales and minima of four bits.
template <class Format>
  requires std::is_same_v<Format, formats::Q2K>
inline void steps_of(const uint8_t* p, float* times, float* less) {
  const __m128i bytes = half_bytes_at(p), mask = _mm_set1_epi8(15);
  store_steps(_mm_and_si128(bytes, mask), fast_half_at(p + 80), times);
  store_steps(_mm_and_si128(_mm_srli_epi16(bytes, 4), mask), fast_half_at(p + 82), less);
}
// Q3_K: sixteen scales of six bits, less 32.
template <class Format>
  requires std::is_same_v<Format, formats::Q3K>
inline void steps_of(const uint8_t* p, float* times, float*) {
  const __m128i low = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 96));
  const __m128i four = _mm_and_si128(_mm_unpacklo_epi64(low, _mm_srli_epi16(low, 4)), _mm_set1_epi8(15));
  const auto two = static_cast<int>(word_at(p + 104, 0));
  const __m128i pairs = _mm_srlv_epi32(_mm_set1_epi32(two), _mm_setr_epi32(0, 2, 4, 6));
  const __m128i high = _mm_slli_epi16(_mm_and_si128(pairs, _mm_set1_epi8(3)), 4);
  store_steps(_mm_sub_epi8(_mm_or_si128(four, high), _mm_set1_epi8(32)), fast_half_at(p + 108), times);
}
// IQ4_XS: eight scales of six bits, less 32.
template <class Format>
  requires std::is_same_v<Format, formats::Iq4Xs>
inline void steps_of(const uint8_t* p, float* times, float*) {
  const __m256i twos = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
  const __m256i low =
      _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int>(word_at(p + 4, 0))), _mm256_slli_epi32(twos, 1));
  const __m256i high = _mm256_slli_epi32(_mm256_srlv_epi32(_mm256_set1_epi32(p[2] | p[3] << 8), twos), 4);
  const __m256i code =
      _mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi32(15)), _mm256_and_si256(high, _mm256_set1_epi32(48)));
  const __m256 scale = _mm256_cvtepi32_ps(_mm256_sub_epi32(code, _mm256_set1_epi32(32)));
  store_doubled(_mm256_mul_ps(_mm256_set1_ps(fast_half_at(p)), scale), times);
}

// Blocks of thirty-two columns that begin with a float16 scale, and a float16 that all numbers have less or more.
template <class Format>
constexpr bool kHalvesFirst = kInBlocks<Format> && Format::kTraits.block == 32 && !kE2m1<Format>;

// Of columns [first, first + size), at most kAffineColumns, those of a column k at (k - first / 256 * 256) / 16;
// `group` is that of the first.
template <class Format>
inline void affines_of(const Quantized& q, int64_t row, int64_t first, int64_t size, int64_t group, Affines& to) {
  const int64_t base = first / 256 * 256, end = first + size;
  if constexpr (kHasSteps<Format>) {
    for (int64_t k = base; k < end; k += 256)
      steps_of<Format>(Format::block_of(q, row, k), to.times + (k - base) / 16, to.less + (k - base) / 16);
  } else if constexpr (kHalvesFirst<Format>) {
    constexpr bool kLess = kNumberForm<Format> == NumberForm::kTakenOff;
    constexpr int64_t kBytes = Format::kTraits.block_bytes;
    alignas(16) uint16_t halves[2][Affines::kCount / 2 + 8] = {};
    const uint8_t* from = Format::block_of(q, row, base);
    const int64_t count = (end - base) / 32;
    for (int64_t i = (first - base) / 32; i < count; ++i) {
      std::memcpy(&halves[0][i], from + i * kBytes, 2);
      if constexpr (kLess) std::memcpy(&halves[1][i], from + i * kBytes + 2, 2);
    }
    const auto floats = [](const uint16_t* of) {
      return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(of)));
    };
    for (int64_t i = 0; i < count; i += 8) {
      store_doubled(floats(halves[0] + i), to.times + 2 * i);
      if constexpr (kLess) store_doubled(_mm256_sub_ps(_mm256_setzero_ps(), floats(halves[1] + i)), to.less + 2 * i);
    }
  } else if constexpr (std::is_same_v<Format, formats::Mxfp4>) {
    const uint8_t* const powers = static_cast<const uint8_t*>(q.scales) + row * q.groups + base / 32;
    for (int64_t i = 0, count = (end - base) / 32; i < count; i += 8) {
      int64_t eight = 0;
      if (count - i >= 8) {
        std::memcpy(&eight, powers + i, sizeof eight);
      } else {
        std::memcpy(&eight, powers + i, static_cast<size_t>(count - i));
      }
      store_doubled(half_powers_of(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(eight))), to.times + 2 * i);
    }
  } else {
    for (int64_t k = first; k < end;) {
      const SharedColumns shared = shared_columns<Format>(q, row, k, end, group);
      for (group = shared.group; k < shared.stop; k += 16) {
        to.times[static_cast<uint64_t>(k - base) / 16] = shared.by.times;
        if constexpr (kNumberForm<Format> != NumberForm::kScaled)
          to.less[static_cast<uint64_t>(k - base) / 16] = shared.by.less;
      }
    }
  }
}

// Bounded is what is neither infinite, nor none, nor so small that a number could be subnormal.
inline bool is_bounded(float x) {
  const uint32_t bits = to_bits(x) & 0x7fffffff;
  return bits == 0 || (bits >= 0x20000000 && bits <= 0x70000000);  // 2^-63, 2^97
}

// Whether all of some columns are, where numbers need to be rounded: those of E2M1 do not, and scales of float16 are
// bounded unless they are infinite or none.
template <class Format>
inline bool are_bounded(const Affines& by, int64_t first, int64_t size) {
  const int64_t base = first / 256 * 256, begin = (first - base) / 16, end = begin + size / 16;
  if constexpr (kE2m1<Format>) return true;
  if constexpr (kHasSteps<Format> || kHalvesFirst<Format>) {  // of which whole vectors have been read
    __m256 none = _mm256_setzero_ps();
    const auto check = [&](const float* of) {
      const __m256 eight = _mm256_load_ps(of);
      none = _mm256_or_ps(none, _mm256_sub_ps(eight, eight));
    };
    for (int64_t i = 0; i < end; i += 8) {
      check(by.times + i);
      if constexpr (kNumberForm<Format> != NumberForm::kScaled) check(by.less + i);
    }
    return _mm256_movemask_ps(_mm256_cmp_ps(none, none, _CMP_UNORD_Q)) == 0;
  }
  const __m256i sign = _mm256_set1_epi32(0x7fffffff), zero = _mm256_setzero_si256();
  const __m256i places = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  __m256i any = zero;
  for (int64_t i = begin / 8 * 8; i < end; i += 8) {
    const auto check = [&](const float* of) {
      const __m256i bits = _mm256_and_si256(_mm256_castps_si256(_mm256_load_ps(of + i)), sign);
      const __m256i large = _mm256_cmpgt_epi32(bits, _mm256_set1_epi32(0x70000000));  // 2^97
      const __m256i small = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x20000000), bits);  // 2^-63
      const __m256i outside = _mm256_or_si256(large, _mm256_andnot_si256(_mm256_cmpeq_epi32(bits, zero), small));
      const __m256i at = _mm256_add_epi32(places, _mm256_set1_epi32(static_cast<int>(i)));
      const __m256i before = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(begin)), at);
      const __m256i within = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(end)), at);
      any = _mm256_or_si256(any, _mm256_and_si256(outside, _mm256_andnot_si256(before, within)));
    };
    check(by.times);
    if constexpr (kNumberForm<Format> != NumberForm::kScaled) check(by.less);
  }
  return _mm256_testz_si256(any, any) != 0;
}

// Asks memory for what lies `lead` bytes after the codes of a part of a row. Always inlined: of a function that does
// nothing else gcc 12 takes the calls for useless.
template <class Format>
inline __attribute__((always_inline)) void fetch_part(const uint8_t* line, int64_t first, int64_t size, int64_t lead) {
  constexpr int64_t kBlock = Format::kTraits.block, kBytes = Format::kTraits.block_bytes;
  if (lead == 0) return;
  const uint8_t *at = line + first / kBlock * kBytes + lead, *const end = at + size / kBlock * kBytes;
  for (; at < end; at += 64) _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T1);
}

// ---------------------------------------------------------------------------------------------------------------------
// Codes as the bytes that numbers are made of.

// In the middle of the codes of a format, where all numbers of its scale have the same zero point.
template <class Format>
constexpr int kMiddle = 0;
template <>
constexpr int kMiddle<formats::Q4_0> = 8;
template <>
constexpr int kMiddle<formats::Q5_0> = 16;
template <>
constexpr int kMiddle<formats::Q3K> = 4;
template <>
constexpr int kMiddle<formats::Q6K> = 32;
template <>
constexpr int kMiddle<formats::Tq2_0> = 1;
template <class Format>
  requires kHasPoints<Format>
constexpr int kMiddle<Format> = Format::kZero;

// Whole numbers that codes of four bits stand for.
alignas(16) constexpr int8_t kTwiceE2m1Bytes[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
alignas(16) constexpr int8_t kIq4Bytes[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
template <class Format>
constexpr const int8_t* kByteValues =
    kE2m1<Format> || kBySixteen<Format>                                                ? kTwiceE2m1Bytes
    : std::is_same_v<Format, formats::Iq4Nl> || std::is_same_v<Format, formats::Iq4Xs> ? kIq4Bytes
                                                                                       : nullptr;

template <class Format>
constexpr bool kSignedCodes = kSignedBytes<Format> || kMiddle<Format> != 0 || kByteValues<Format> != nullptr;

template <class Format>
inline __m256i number_codes(const uint8_t* line, int64_t k) {
  const __m256i codes = codes_of(Format(), line, k);
  if constexpr (kByteValues<Format> != nullptr) {
    const auto* const values = reinterpret_cast<const __m128i*>(kByteValues<Format>);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128(values)), codes);
  }
  if constexpr (kMiddle<Format> != 0)
    return _mm256_sub_epi8(codes, _mm256_set1_epi8(static_cast<char>(kMiddle<Format>)));
  return codes;
}

// The lowest eight bytes as floats.
template <bool kSigned>
inline __m256 floats_of_bytes(__m128i bytes) {
  return _mm256_cvtepi32_ps(kSigned ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
}

template <class Format>
inline __m256 number_of(__m256 code, __m256 times, const float* less) {
  constexpr NumberForm kForm = kNumberForm<Format>;
  if constexpr (kForm == NumberForm::kScaled) return _mm256_mul_ps(code, times);
  const __m256 by = _mm256_broadcast_ss(less);
  if constexpr (kForm == NumberForm::kZeroed) return _mm256_mul_ps(_mm256_sub_ps(code, by), times);
  // Products of codes with steps of a block need no rounding.
  if constexpr (kInBlocks<Format>) return _mm256_fmsub_ps(times, code, by);
  return _mm256_sub_ps(_mm256_mul_ps(times, code), by);
}

}  // namespace
}  // namespace moelight
