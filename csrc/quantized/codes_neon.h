// The codes of quantised matrices as unsigned bytes, thirty-two columns of a row at once, for NEON. Internal linkage.
#pragma once

#include <arm_neon.h>

#include "integers.h"

namespace moelight {
namespace {

// Of thirty-two columns.
struct Codes {
  uint8x16_t low, high;
};

inline Codes bytes_at(const uint8_t* p) { return {vld1q_u8(p), vld1q_u8(p + 16)}; }

// Codes of two in a byte: the earlier one in the low half, or sixteen in low halves before sixteen in high ones.
inline Codes halved_nibbles(const uint8_t* p) {
  const uint8x16_t bytes = vld1q_u8(p);
  return {vandq_u8(bytes, vdupq_n_u8(15)), vshrq_n_u8(bytes, 4)};
}
inline Codes paired_nibbles(const uint8_t* p) {
  const Codes apart = halved_nibbles(p);
  return {vzip1q_u8(apart.low, apart.high), vzip2q_u8(apart.low, apart.high)};
}
// `mask` of each byte from bit `shift` on, moved up to bit `to`.
inline Codes bits_of(Codes bytes, int64_t shift, int mask, int to = 0) {
  const int8x16_t down = vdupq_n_s8(static_cast<int8_t>(-shift)), up = vdupq_n_s8(static_cast<int8_t>(to));
  const uint8x16_t field = vdupq_n_u8(static_cast<uint8_t>(mask));
  return {vshlq_u8(vandq_u8(vshlq_u8(bytes.low, down), field), up),
          vshlq_u8(vandq_u8(vshlq_u8(bytes.high, down), field), up)};
}
inline Codes either(Codes x, Codes y) { return {vorrq_u8(x.low, y.low), vorrq_u8(x.high, y.high)}; }
inline Codes looked_up(Codes index, const uint8_t* sixteen) {
  const uint8x16_t table = vld1q_u8(sixteen);
  return {vqtbl1q_u8(table, index.low), vqtbl1q_u8(table, index.high)};
}
inline Codes in_order(Codes x, const uint8_t* order) {
  const uint8x16_t index = vld1q_u8(order);
  return {vqtbl1q_u8(x.low, index), vqtbl1q_u8(x.high, index)};
}
inline Codes signs_turned(Codes x) {
  const uint8x16_t sign = vdupq_n_u8(0x80);
  return {veorq_u8(x.low, sign), veorq_u8(x.high, sign)};
}

// Of thirty-two bits, each as the fifth bit of a byte.
inline Codes fifth_bits(const uint8_t* p) {
  const uint8_t places[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const uint8x16_t bits = vld1q_u8(places), fifth = vdupq_n_u8(16);
  const auto spread = [&](int i) {
    return vandq_u8(vtstq_u8(vcombine_u8(vdup_n_u8(p[i]), vdup_n_u8(p[i + 1])), bits), fifth);
  };
  return {spread(0), spread(2)};
}

// Unsigned codes of columns [k, k + 32) (integers.h), k a multiple of 32, of a row that begins at `line`: for formats
// that have them at once.
inline Codes codes_of(formats::Int8, const uint8_t* line, int64_t k) { return signs_turned(bytes_at(line + k)); }
inline Codes codes_of(formats::Packed<8>, const uint8_t* line, int64_t k) { return bytes_at(line + k); }
inline Codes codes_of(formats::Packed<4>, const uint8_t* line, int64_t k) { return paired_nibbles(line + k / 2); }
inline Codes codes_of(formats::Mxfp4, const uint8_t* line, int64_t k) {
  return looked_up(paired_nibbles(line + k / 2), kE2m1Codes);
}
inline Codes codes_of(formats::Mxfp4Blocks, const uint8_t* line, int64_t k) {
  return looked_up(halved_nibbles(line + k / 32 * 17 + 1), kE2m1Codes);
}
inline Codes codes_of(formats::Q4_0, const uint8_t* line, int64_t k) { return halved_nibbles(line + k / 32 * 18 + 2); }
inline Codes codes_of(formats::Q4_1, const uint8_t* line, int64_t k) { return halved_nibbles(line + k / 32 * 20 + 4); }
inline Codes codes_of(formats::Q5_0, const uint8_t* line, int64_t k) {
  const uint8_t* const p = line + k / 32 * 22 + 2;
  return either(halved_nibbles(p + 4), fifth_bits(p));
}
inline Codes codes_of(formats::Q5_1, const uint8_t* line, int64_t k) {
  const uint8_t* const p = line + k / 32 * 24 + 4;
  return either(halved_nibbles(p + 4), fifth_bits(p));
}
inline Codes codes_of(formats::Q8_0, const uint8_t* line, int64_t k) {
  return signs_turned(bytes_at(line + k / 32 * 34 + 2));
}
inline Codes codes_of(formats::Q4K, const uint8_t* line, int64_t k) {
  const int64_t i = k % 256;
  return bits_of(bytes_at(line + k / 256 * 144 + 16 + i / 64 * 32), i % 64 / 32 * 4, 15);
}
inline Codes codes_of(formats::Q5K, const uint8_t* line, int64_t k) {
  const int64_t i = k % 256;
  const uint8_t* const p = line + k / 256 * 176;
  return either(bits_of(bytes_at(p + 48 + i / 64 * 32), i % 64 / 32 * 4, 15), bits_of(bytes_at(p + 16), i / 32, 1, 4));
}
inline Codes codes_of(formats::Q6K, const uint8_t* line, int64_t k) {
  const int64_t i = k % 256;
  const uint8_t* const p = line + k / 256 * 210;
  return either(bits_of(bytes_at(p + i / 128 * 64 + i % 64), i % 128 / 64 * 4, 15),
                bits_of(bytes_at(p + 128 + i / 128 * 32), i % 128 / 32 * 2, 3, 4));
}

template <class Format>
constexpr bool kHasCodes = requires(const uint8_t* line) { codes_of(Format(), line, 0); };

}  // namespace
}  // namespace moelight
