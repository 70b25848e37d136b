// The numbers of quantised matrices, one row at a time, in plain code for any processor. Internal linkage: every
// instruction set compiles its own copy.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "quantized.h"

namespace moelight {
namespace {

// Twice the numbers of E2M1: with halves of the powers of two all products are those of the numbers, also where the
// power alone would be infinite. ggml has no zero with a sign.
constexpr float kTwiceE2m1[16] = {0.0f,  1.0f,  2.0f,  3.0f,  4.0f,  6.0f,  8.0f,  12.0f,
                                  -0.0f, -1.0f, -2.0f, -3.0f, -4.0f, -6.0f, -8.0f, -12.0f};
constexpr float kDoubledE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
constexpr float kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
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

inline float scale_at(const Quantized& q, int64_t i) {
  switch (q.scale_type) {
    case ScaleType::kFloat32: {
      float value;
      std::memcpy(&value, static_cast<const char*>(q.scales) + 4 * i, sizeof value);
      return value;
    }
    case ScaleType::kBFloat16:
      return to_float(static_cast<const Bf16*>(q.scales)[i]);
    case ScaleType::kFloat16:
      return to_float(static_cast<const Fp16*>(q.scales)[i]);
    case ScaleType::kPower:
      break;
  }
  const uint32_t e = static_cast<const uint8_t*>(q.scales)[i];
  return e == 255 ? from_bits(0x7fc00000) : power_of(e);
}

inline uint32_t word_at(const uint8_t* words, int64_t i) {
  uint32_t word;
  std::memcpy(&word, words + 4 * i, sizeof word);
  return word;
}

// Zero point and scale of a row in a group of columns; the number is (code - zero) scale.
struct Line {
  float zero, scale;
};

inline Line line_of(const Quantized& q, int64_t row, int64_t group) {
  const uint32_t mask = (1u << q.bits) - 1;
  const int64_t per = 32 / q.bits;
  switch (q.packing) {
    case Packing::kPacked: {
      const int64_t at = row * q.groups + group;
      if (q.zeros == nullptr) return {static_cast<float>(1 << (q.bits - 1)), scale_at(q, at)};
      const uint32_t word = word_at(q.zeros, row / per * q.groups + group);
      return {static_cast<float>((word >> (q.bits * (row % per))) & mask), scale_at(q, at)};
    }
    case Packing::kGptq: {
      const uint32_t word = word_at(q.zeros, group * (q.rows / per) + row / per);
      const uint32_t zero = ((word >> (q.bits * (row % per))) + static_cast<uint32_t>(q.zero_bias)) & mask;
      return {static_cast<float>(zero), scale_at(q, group * q.rows + row)};
    }
    case Packing::kAwq: {
      const uint32_t word = word_at(q.zeros, group * (q.rows / per) + row / per);
      return {static_cast<float>((word >> (4 * kAwqPlaces[row % per])) & mask), scale_at(q, group * q.rows + row)};
    }
    default:
      break;
  }
  const int64_t at = (q.group_rows == 0 ? 0 : row / q.group_rows) * q.groups + group;
  if (q.zeros == nullptr) return {0.0f, scale_at(q, at)};
  return {static_cast<float>(static_cast<int8_t>(q.zeros[at])), scale_at(q, at)};
}

inline int64_t group_of(const Quantized& q, int64_t column) {
  if (q.order == nullptr) return column / q.group;
  return std::clamp<int64_t>(q.order[column], 0, q.groups - 1);
}

// code(column) as float, minus zero, times scale, of a part of a row.
template <class Code>
void in_groups(const Quantized& q, int64_t row, int64_t first, int64_t size, float* to, Code&& code) {
  if (q.order != nullptr) {
    for (int64_t k = first; k < first + size; ++k) {
      const Line line = line_of(q, row, group_of(q, k));
      *to++ = (code(k) - line.zero) * line.scale;
    }
    return;
  }
  for (int64_t k = first, end = first + size; k < end;) {
    const int64_t group = k / q.group, stop = std::min(end, (group + 1) * q.group);
    const Line line = line_of(q, row, group);
    for (; k < stop; ++k) *to++ = (code(k) - line.zero) * line.scale;
  }
}

template <int kBits>
void packed_row(const Quantized& q, int64_t row, int64_t first, int64_t size, float* to) {
  constexpr int64_t kPer = 8 / kBits;
  const uint8_t* const from = q.codes + row * q.row_bytes;
  in_groups(q, row, first, size, to, [from](int64_t k) {
    return static_cast<float>((from[k / kPer] >> (kBits * (k % kPer))) & ((1 << kBits) - 1));
  });
}

template <int kBits>
void gptq_row(const Quantized& q, int64_t row, int64_t first, int64_t size, float* to) {
  constexpr int64_t kPer = 32 / kBits;
  in_groups(q, row, first, size, to, [&q, row](int64_t k) {
    return static_cast<float>((word_at(q.codes, k / kPer * q.rows + row) >> (kBits * (k % kPer))) & ((1 << kBits) - 1));
  });
}

inline void awq_row(const Quantized& q, int64_t row, int64_t first, int64_t size, float* to) {
  const int shift = 4 * kAwqPlaces[row % 8];
  const int64_t words = q.rows / 8, word = row / 8;
  in_groups(q, row, first, size, to, [&q, shift, words, word](int64_t k) {
    return static_cast<float>((word_at(q.codes, k * words + word) >> shift) & 15);
  });
}

inline void mx_row(const Quantized& q, int64_t row, int64_t first, int64_t size, float* to) {
  const uint8_t* const from = q.codes + row * q.row_bytes;
  const auto* const powers = static_cast<const uint8_t*>(q.scales) + row * q.groups;
  for (int64_t k = first; k < first + size; ++k)
    *to++ = kTwiceE2m1[(from[k / 2] >> (4 * (k % 2))) & 15] * half_power_of(powers[k / 32]);
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
      const uint8_t a = packed[i], b = packed[4 + i], both = packed[8 + i];
      scale[i] = a & 63, least[i] = b & 63;
      scale[4 + i] = static_cast<uint8_t>((both & 15) | ((a >> 2) & 48));
      least[4 + i] = static_cast<uint8_t>((both >> 4) | ((b >> 2) & 48));
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

inline void small_block(Packing packing, const uint8_t* p, float* to) {
  const bool offset = packing == Packing::kQ4_1 || packing == Packing::kQ5_1;
  const bool five = packing == Packing::kQ5_0 || packing == Packing::kQ5_1;
  const float scale = packing == Packing::kMxBlocks ? half_power_of(p[0]) : half_at(p);
  const float least = offset ? half_at(p + 2) : 0.0f;
  const uint8_t* const bits = p + (offset ? 4 : 2);
  const uint8_t* const codes = packing == Packing::kMxBlocks ? p + 1 : bits + (five ? 4 : 0);
  for (int i = 0; i < 32; ++i) {
    if (packing == Packing::kQ8_0) {
      to[i] = scale * static_cast<float>(static_cast<int8_t>(codes[i]));
      continue;
    }
    const uint32_t code = (codes[i % 16] >> (i < 16 ? 0 : 4)) & 15;
    const uint32_t high = five ? ((bits[i / 8] >> (i % 8)) & 1u) << 4 : 0;
    if (packing == Packing::kIq4Nl || packing == Packing::kMxBlocks) {
      to[i] = scale * (packing == Packing::kIq4Nl ? kIq4 : kDoubledE2m1)[code];
    } else if (offset) {
      to[i] = scale * static_cast<float>(code | high) + least;
    } else {
      to[i] = scale * (static_cast<float>(code | high) - (five ? 16.0f : 8.0f));
    }
  }
}

inline void k_block(const uint8_t* p, bool five, float* to) {
  const KScales scales(p + 4);
  const float scale = half_at(p), least = half_at(p + 2);
  const uint8_t* const codes = p + (five ? 48 : 16);
  for (int i = 0; i < 256; ++i) {
    const uint32_t high = five ? piece(p + 16, 32, 1, i) << 4 : 0;
    const float step = scale * scales.scale[i / 32], below = least * scales.least[i / 32];
    to[i] = step * static_cast<float>(piece(codes, 32, 4, i) | high) - below;
  }
}

inline void large_block(Packing packing, const uint8_t* p, float* to) {
  switch (packing) {
    case Packing::kQ2_K:
      for (int i = 0; i < 256; ++i) {
        const float step = half_at(p + 80) * static_cast<float>(p[i / 16] & 15);
        to[i] =
            step * static_cast<float>(piece(p + 16, 32, 2, i)) - half_at(p + 82) * static_cast<float>(p[i / 16] >> 4);
      }
      return;
    case Packing::kQ3_K:
      for (int i = 0; i < 256; ++i) {
        const float above = 1.0f - static_cast<float>(piece(p, 32, 1, i));
        const float code = static_cast<float>(piece(p + 32, 32, 2, i)) - 4.0f * above;
        to[i] = half_at(p + 108) * q3_scale(p + 96, i / 16) * code;
      }
      return;
    case Packing::kQ6_K:
      for (int i = 0; i < 256; ++i) {
        const uint32_t code = piece(p, 64, 4, i) | piece(p + 128, 32, 2, i) << 4;
        const float step = half_at(p + 208) * static_cast<float>(static_cast<int8_t>(p[192 + i / 16]));
        to[i] = step * (static_cast<float>(code) - 32.0f);
      }
      return;
    case Packing::kIq4Xs:
      for (int i = 0; i < 256; ++i) to[i] = half_at(p) * iq4_scale(p, i / 32) * kIq4[piece(p + 8, 16, 4, i)];
      return;
    default:
      return k_block(p, packing == Packing::kQ5_K, to);
  }
}

inline void blocks_row(const Quantized& q, int64_t row, int64_t first, int64_t size, float* to) {
  const BlockSize block = block_size(q.packing);
  for (int64_t k = first, end = first + size; k < end;) {
    const uint8_t* const from = q.codes + row * q.row_bytes + k / block.numbers * block.bytes;
    float numbers[256];
    if (block.numbers == 32) {
      small_block(q.packing, from, numbers);
    } else {
      large_block(q.packing, from, numbers);
    }
    const int64_t skip = k % block.numbers, some = std::min(block.numbers - skip, end - k);
    std::copy_n(numbers + skip, some, to);
    to += some, k += some;
  }
}

// Columns [first, first + size) of a row.
inline void numbers_of(const Quantized& q, int64_t row, int64_t first, int64_t size, float* to) {
  const uint8_t* const bytes = q.codes + row * q.row_bytes;
  switch (q.packing) {
    case Packing::kFp8:
      return in_groups(q, row, first, size, to, [bytes](int64_t k) { return e4m3(bytes[k]); });
    case Packing::kInt8:
      return in_groups(q, row, first, size, to,
                       [bytes](int64_t k) { return static_cast<float>(static_cast<int8_t>(bytes[k])); });
    case Packing::kPacked:
      return (q.bits == 4 ? packed_row<4> : q.bits == 8 ? packed_row<8> : packed_row<2>)(q, row, first, size, to);
    case Packing::kGptq:
      return (q.bits == 4 ? gptq_row<4> : q.bits == 8 ? gptq_row<8> : gptq_row<2>)(q, row, first, size, to);
    case Packing::kAwq:
      return awq_row(q, row, first, size, to);
    case Packing::kMx:
      return mx_row(q, row, first, size, to);
    default:
      return blocks_row(q, row, first, size, to);
  }
}

// An Unpack of any format.
// As numbers X, rounded to R before.
template <class X, class R = X>
void unpack_plainly(const Quantized& q, int64_t row, int64_t rows, int64_t first, int64_t size, int64_t, void* to,
                    int64_t to_bytes) {
  for (int64_t r = 0; r < rows; ++r) {
    alignas(64) float line[kMostColumns];
    numbers_of(q, row + r, first, size, line);
    auto* const out = reinterpret_cast<X*>(static_cast<char*>(to) + r * to_bytes);
    for (int64_t i = 0; i < size; ++i) {
      R rounded;
      from_float(line[i], rounded);
      if constexpr (std::is_same_v<X, R>)
        out[i] = rounded;
      else
        out[i] = to_float(rounded);
    }
    for (int64_t i = size; i % kUnpackStep != 0; ++i) out[i] = {};
  }
}

inline Unpack unpack_to(DType type) {
  switch (type) {
    case DType::kBFloat16:
      return unpack_plainly<Bf16>;
    case DType::kFloat16:
      return unpack_plainly<Fp16>;
    case DType::kFloat32:
      break;
  }
  return unpack_plainly<float>;
}

}  // namespace
}  // namespace moelight
