// What the formats of quantised matrices (formats.h) are made of: scales, zero points, words and pieces of blocks, in
// plain code for any processor. Internal linkage: every instruction set compiles its own copy.
#pragma once

#include <algorithm>
#include <cstring>

#include "quantized.h"

namespace moelight {
namespace {

// Twice the numbers of E2M1: with halves of the powers of two all products are those of the numbers, also where the
// power alone would be infinite. ggml has no zero with a sign.
constexpr float kTwiceE2m1[16] = {0.0f,  1.0f,  2.0f,  3.0f,  4.0f,  6.0f,  8.0f,  12.0f,
                                  -0.0f, -1.0f, -2.0f, -3.0f, -4.0f, -6.0f, -8.0f, -12.0f};
constexpr float kDoubledE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
// Twice the numbers of E2M1, plus 12.
constexpr uint8_t kE2m1Codes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
constexpr float kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
// bitsandbytes' numbers of NF4 and FP4.
constexpr float kNf4[16] = {-1.0f,           -0x1.647362p-1f, -0x1.0cd66p-1f,  -0x1.94654p-2f,
                            -0x1.23449ap-2f, -0x1.7a6a7ep-3f, -0x1.74f0e2p-4f, 0.0f,
                            0x1.45f5fep-4f,  0x1.4995c6p-3f,  0x1.f809bap-3f,  0x1.5a0674p-2f,
                            0x1.c3497p-2f,   0x1.200f56p-1f,  0x1.722766p-1f,  1.0f};
constexpr float kFp4[16] = {
    0.0f, 0x1.555556p-8f,  0x1.555556p-1f,  1.0f,  0x1.555556p-2f,  0.5f,  0x1.555556p-3f,  0.25f,
    0.0f, -0x1.555556p-8f, -0x1.555556p-1f, -1.0f, -0x1.555556p-2f, -0.5f, -0x1.555556p-3f, -0.25f};
// The place in an AWQ word of each of its eight rows.
constexpr int kAwqPlaces[8] = {0, 4, 1, 5, 2, 6, 3, 7};

inline float half_at(const uint8_t* p) {
  Fp16 half;
  std::memcpy(&half, p, sizeof half);
  return to_float(half);
}

// 2^(e - 127), of less than 255.
inline float power_of(uint32_t e) { return from_bits(e == 0 ? 0x00400000u : e << 23); }
// 2^(e - 128).
inline float half_power_of(uint32_t e) { return from_bits(e < 2 ? 0x00200000u << e : (e - 1) << 23); }

inline float e4m3(uint8_t code) {
  const uint32_t magnitude = code & 0x7f, sign = static_cast<uint32_t>(code & 0x80) << 24;
  // As float bits the magnitude stands 2^120 too low, subnormals included.
  const float value = from_bits(magnitude << 20) * from_bits(0x7b800000);
  return from_bits(sign | (magnitude == 0x7f ? 0x7fc00000 : to_bits(value)));
}

inline float float_at(const void* p, int64_t i = 0) {
  float value;
  std::memcpy(&value, static_cast<const char*>(p) + 4 * i, sizeof value);
  return value;
}

inline float number_at(const void* p, ScaleType type, int64_t i) {
  switch (type) {
    case ScaleType::kFloat32:
      return float_at(p, i);
    case ScaleType::kBFloat16:
      return to_float(static_cast<const Bf16*>(p)[i]);
    case ScaleType::kFloat16:
      return to_float(static_cast<const Fp16*>(p)[i]);
    case ScaleType::kPower:
      break;
  }
  const uint32_t e = static_cast<const uint8_t*>(p)[i];
  return e == 255 ? from_bits(0x7fc00000) : power_of(e);
}
inline float scale_at(const Quantized& q, int64_t i) { return number_at(q.scales, q.scale_type, i); }

inline uint32_t word_at(const uint8_t* words, int64_t i) {
  uint32_t word;
  std::memcpy(&word, words + 4 * i, sizeof word);
  return word;
}

// Zero point and scale of a row in a group of columns; the number is (code - zero) scale.
struct Line {
  float zero, scale;
};

inline int64_t group_of(const Quantized& q, int64_t column) {
  if (q.order == nullptr) return column / q.group;
  return std::clamp<int64_t>(q.order[column], 0, q.groups - 1);
}

// code(column) as float, minus zero, times scale, of a part of a row of Format.
template <class Format, class Code>
void in_groups(const Quantized& q, int64_t row, int64_t first, int64_t size, float* to, Code&& code) {
  if (q.order != nullptr) {
    for (int64_t k = first; k < first + size; ++k) {
      const Line line = Format::line(q, row, group_of(q, k));
      *to++ = (code(k) - line.zero) * line.scale;
    }
    return;
  }
  for (int64_t k = first, end = first + size; k < end;) {
    const int64_t group = k / q.group, stop = std::min(end, (group + 1) * q.group);
    const Line line = Format::line(q, row, group);
    for (; k < stop; ++k) *to++ = (code(k) - line.zero) * line.scale;
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// ggml's blocks.

// Code i of `bits` bits: of each `width` bytes first the lowest bits of all, then the next ones.
inline uint32_t piece(const uint8_t* p, int width, int bits, int i) {
  const int per = 8 / bits * width;
  return (p[i / per * width + i % width] >> (i % per / width * bits)) & ((1u << bits) - 1);
}

// Scale and minimum, of 6 bits, of each of the eight groups of a block of Q4_K and Q5_K.
struct KScales {
  uint8_t scale[8], least[8];
  explicit KScales(const uint8_t* packed) {
    for (int i = 0; i < 4; ++i) {
      const uint8_t a = packed[i], b = packed[4 + i], shared = packed[8 + i];
      scale[i] = a & 63, least[i] = b & 63;
      scale[4 + i] = static_cast<uint8_t>((shared & 15) | ((a >> 2) & 48));
      least[4 + i] = static_cast<uint8_t>((shared >> 4) | ((b >> 2) & 48));
    }
  }
};

// The scales of the sixteen groups of a block of Q3_K, less 32, and of the eight of IQ4_XS.
inline float q3_scale(const uint8_t* packed, int i) {
  return static_cast<float>(static_cast<int>(piece(packed, 8, 4, i) | piece(packed + 8, 4, 2, i) << 4) - 32);
}
inline float iq4_scale(const uint8_t* block, int i) {
  const uint32_t high = (block[2 + i / 4] >> (2 * (i % 4))) & 3;
  return static_cast<float>(static_cast<int>(piece(block + 4, 1, 4, i) | high << 4) - 32);
}

}  // namespace
}  // namespace moelight
