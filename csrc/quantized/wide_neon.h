// Unpacks quantised matrices for NEON: numbers X (float or Bf16) with the bits of the plain code (numbers.h).
// Internal linkage.
#pragma once

#include "codes_neon.h"
#include "unpack.h"

namespace moelight {
namespace {

// What sixteen codes have in common: the number is (code - zero) scale - less.
struct Affine {
  float zero, scale, less;
};

// Of columns [k, k + 16) and [k + 16, k + 32).
template <class Format>
void affine_at(const Quantized& q, int64_t row, int64_t k, Affine (&to)[2]) {
  if constexpr (kParted<Format>) {
    const IntegerParts parts = Format::parts(Format::block_of(q, row, k));
    const int64_t i = k % 256;
    for (int64_t j = 0; j < 2; ++j) {
      if constexpr (Format::kLeast) {
        to[j] = {0.0f, parts.scale * static_cast<float>(parts.steps[i / 32]),
                 parts.least * static_cast<float>(parts.lows[i / 32])};
      } else {
        to[j] = {32.0f, parts.scale * static_cast<float>(parts.steps[i / 16 + j]), 0.0f};
      }
    }
  } else {
    const IntegerLine by = Format::integer_line(q, row, k);
    to[0] = to[1] = {static_cast<float>(by.zero), by.scale, by.least};
  }
}

// Bits of which the upper half is the bf16 next to x, as from_float has it.
inline uint16x8_t rounded_bits(float32x4_t x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x), last = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t up = vaddq_u32(bits, vaddq_u32(last, vdupq_n_u32(0x7fff)));
  const uint32x4_t none = vorrq_u32(bits, vdupq_n_u32(0x00400000));
  return vreinterpretq_u16_u32(vbslq_u32(vceqq_f32(x, x), up, none));
}

inline void store_eight(float32x4_t low, float32x4_t high, float* to) { vst1q_f32(to, low), vst1q_f32(to + 4, high); }
inline void store_eight(float32x4_t low, float32x4_t high, Bf16* to) {
  vst1q_u16(&to->bits, vuzp2q_u16(rounded_bits(low), rounded_bits(high)));
}

template <class X>
inline void unpack_sixteen(uint8x16_t codes, const Affine& by, X* to) {
  const auto number = [&by](uint32x4_t code) {
    const float32x4_t part = vmulq_n_f32(vsubq_f32(vcvtq_f32_u32(code), vdupq_n_f32(by.zero)), by.scale);
    return vsubq_f32(part, vdupq_n_f32(by.less));
  };
  const uint16x8_t halves[2] = {vmovl_u8(vget_low_u8(codes)), vmovl_high_u8(codes)};
  for (int i = 0; i < 2; ++i)
    store_eight(number(vmovl_u16(vget_low_u16(halves[i]))), number(vmovl_high_u16(halves[i])), to + 8 * i);
}

template <class X, class Format>
void unpack_codes(const Quantized& q, int64_t row, int64_t rows, int64_t first, int64_t size, int64_t lead, void* to,
                  int64_t to_bytes) {
  const int64_t aligned = size / kUnpackStep * kUnpackStep, step = kUnpackStep * q.row_bytes / q.columns;
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* const line = q.codes + (row + r) * q.row_bytes;
    auto* const out = reinterpret_cast<X*>(static_cast<char*>(to) + r * to_bytes);
    const uint8_t* ahead = line + q.row_bytes * first / q.columns + lead;
    for (int64_t k = 0; k < aligned; k += kUnpackStep, ahead += step) {
      __builtin_prefetch(ahead, 0, 2);
      const Codes codes = codes_of(Format(), line, first + k);
      Affine by[2];
      affine_at<Format>(q, row + r, first + k, by);
      unpack_sixteen(codes.low, by[0], out + k), unpack_sixteen(codes.high, by[1], out + k + 16);
    }
    if (aligned < size) unpack_plainly<X>(q, row + r, 1, first + aligned, size - aligned, 0, out + aligned, 0);
  }
}

// MXFP4 of two tensors has a zero with a sign, and FP8 no whole numbers.
template <class X>
Unpack unpack_neon_of(const Quantized& like) {
  const bool even = like.groups == 1 || like.group % kUnpackStep == 0;
  return with_format(like, [&](auto format) -> Unpack {
    using Format = decltype(format);
    if constexpr (kHasCodes<Format> && !std::is_same_v<Format, formats::Mxfp4>)
      if (kInBlocks<Format> || even) return unpack_codes<X, Format>;
    return unpack_plainly<X>;
  });
}

}  // namespace
}  // namespace moelight
