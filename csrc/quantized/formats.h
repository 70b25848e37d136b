// The table of formats: a row (a struct) for each, and `Formats`, the list of all rows. A row says
//   kTraits          name, block and bytes, and where scales and zero points lie: what the binding reads and checks
//   decode_line()    the line decoder: columns [first, first + size) of a row as floats; the reference of all others
//   line()           zero point and scale of a row in a group, where scales lie beside the codes
//   decode()         the numbers of one block, where they lie within it
// and, where its numbers are whole ones times scales, so that tokens rounded to int8 can meet them (integers.h),
//   form()           in which form they are multiplied
//   code()           the unsigned code of one number
//   integer_line()   scale and zero point of the group of a column; or
//   parts()          those of a block whose parts have steps
// That is all a format needs: what an instruction set does faster (codes_*.h, lines.h, panels_*.h, wide_*.h) it says of
// a row by an overload or a specialisation, and everything else runs in this code. Internal linkage: every instruction
// set compiles its own copy. The numbers are those of moelight/kernels/quantized.py, to the bit.
#pragma once

#include <array>
#include <type_traits>

#include "codebooks.h"
#include "numbers.h"

namespace moelight {
namespace {

// How a matrix is multiplied.
struct IntegerForm {
  int64_t group;  // columns of a token that share a scale; divides kPanelColumns
  int64_t part;   // columns of a row that share a step, where they are fewer; divides the group
  bool pairs;     // of eight columns first the even ones, then the odd ones: the order in words of 4-bit codes
  int zero;       // of all codes, or -1: scales have zero points of their own
  bool least;     // something is taken off all numbers of a part, or of a group without parts
  int max_code = 255;

  bool parted() const { return part < group; }
  bool operator==(const IntegerForm&) const = default;
};

// Of a group of columns; `least` where the form has it.
struct IntegerLine {
  float scale;
  int32_t zero;
  float least = 0.0f;
};

// Scales of a block, and the whole numbers of each of its parts.
struct IntegerParts {
  float scale, least;
  int32_t steps[16], lows[8];
};

namespace formats {

// ---------------------------------------------------------------------------------------------------------------------
// Codes whose scales and zero points lie beside them: a number is (code - zero) scale, by groups of columns.

// Integers of such formats; `kBias` is what code() adds to the codes that zero points are of.
template <class Format>
struct GroupedIntegers {
  static constexpr bool kPairs = false;
  static constexpr int32_t kBias = 0;

  static IntegerForm form(const Quantized& q) {
    const int64_t group = q.groups == 1 || q.group % 128 == 0 ? 128 : q.group % 64 == 0 ? 64 : 32;
    return {group, group, Format::kPairs, Format::shared_zero(q), false, (1 << Format::kTraits.bits) - 1};
  }
  static IntegerLine integer_line(const Quantized& q, int64_t row, int64_t k) {
    const Line by = Format::line(q, row, k / q.group);
    return {by.scale, static_cast<int32_t>(by.zero) + Format::kBias};
  }
  // Why a matrix has none, or null.
  static const char* without_integers(const Quantized& q) {
    if (q.groups != 1 && q.group % 32 != 0) return "int8 activations need groups of a multiple of 32 columns";
    for (int64_t k = 0; q.order != nullptr && k < q.columns; ++k)
      if (q.order[k] != k / q.group) return "int8 activations need columns in the order of their groups";
    return nullptr;
  }
};

inline Line line_of_tile(const Quantized& q, int64_t row, int64_t group) {
  const int64_t at = (q.group_rows == 0 ? 0 : row / q.group_rows) * q.groups + group;
  return {q.zeros == nullptr ? 0.0f : static_cast<float>(static_cast<int8_t>(q.zeros[at])), scale_at(q, at)};
}

struct Fp8 {
  static constexpr FormatTraits kTraits = {.name = "fp8", .scales = Scales::kByTiles};
  static Line line(const Quantized& q, int64_t row, int64_t group) { return line_of_tile(q, row, group); }
  static void decode_line(const Quantized& q, int64_t row, int64_t first, int64_t size, float* to) {
    const uint8_t* const from = q.codes + row * q.row_bytes;
    in_groups<Fp8>(q, row, first, size, to, [from](int64_t k) { return e4m3(from[k]); });
  }
};

struct Int8 : GroupedIntegers<Int8> {
  static constexpr FormatTraits kTraits = {.name = "int8", .scales = Scales::kByTiles, .zeros = Zeros::kBytes};
  static constexpr int32_t kBias = 128;
  static Line line(const Quantized& q, int64_t row, int64_t group) { return line_of_tile(q, row, group); }
  static void decode_line(const Quantized& q, int64_t row, int64_t first, int64_t size, float* to) {
    const uint8_t* const from = q.codes + row * q.row_bytes;
    in_groups<Int8>(q, row, first, size, to,
                    [from](int64_t k) { return static_cast<float>(static_cast<int8_t>(from[k])); });
  }
  static int shared_zero(const Quantized& q) { return q.zeros == nullptr ? 128 : -1; }
  static uint8_t code(const Quantized& q, int64_t row, int64_t k) { return q.codes[row * q.row_bytes + k] ^ 0x80; }
};

// Words of rows.
template <int kBits>
struct Packed : GroupedIntegers<Packed<kBits>> {
  static constexpr int64_t kPer = 32 / kBits;
  static constexpr FormatTraits kTraits = {.name = "packed",
                                           .bits = kBits,
                                           .block = kPer,
                                           .block_bytes = 4,
                                           .scales = Scales::kByRows,
                                           .zeros = Zeros::kWords};
  static constexpr bool kPairs = kBits == 4;

  static Line line(const Quantized& q, int64_t row, int64_t group) {
    const float scale = scale_at(q, row * q.groups + group);
    if (q.zeros == nullptr) return {static_cast<float>(1 << (kBits - 1)), scale};
    const uint32_t word = word_at(q.zeros, row / kPer * q.groups + group);
    return {static_cast<float>((word >> (kBits * (row % kPer))) & ((1u << kBits) - 1)), scale};
  }
  static uint8_t stored(const uint8_t* from, int64_t k) {
    return (from[k * kBits / 8] >> (k * kBits % 8)) & ((1 << kBits) - 1);
  }
  static void decode_line(const Quantized& q, int64_t row, int64_t first, int64_t size, float* to) {
    const uint8_t* const from = q.codes + row * q.row_bytes;
    in_groups<Packed>(q, row, first, size, to, [from](int64_t k) { return static_cast<float>(stored(from, k)); });
  }
  static int shared_zero(const Quantized& q) { return q.zeros == nullptr ? 1 << (kBits - 1) : -1; }
  static uint8_t code(const Quantized& q, int64_t row, int64_t k)
    requires(kBits != 2)
  {
    return stored(q.codes + row * q.row_bytes, k);
  }
};

// Words of columns, rows beside each other.
template <int kBits>
struct Gptq : GroupedIntegers<Gptq<kBits>> {
  static constexpr int64_t kPer = 32 / kBits;
  static constexpr FormatTraits kTraits = {.name = "gptq",
                                           .bits = kBits,
                                           .block = 8 / kBits,
                                           .scales = Scales::kByColumns,
                                           .zeros = Zeros::kWords,
                                           .ordered = true,
                                           .row_step = kPer,
                                           .column_step = kPer};
  static constexpr bool kPairs = kBits == 4;

  static Line line(const Quantized& q, int64_t row, int64_t group) {
    const uint32_t word = word_at(q.zeros, group * (q.rows / kPer) + row / kPer);
    const uint32_t zero = (word >> (kBits * (row % kPer))) + static_cast<uint32_t>(q.zero_bias);
    return {static_cast<float>(zero & ((1u << kBits) - 1)), scale_at(q, group * q.rows + row)};
  }
  static uint8_t stored(const Quantized& q, int64_t row, int64_t k) {
    return static_cast<uint8_t>((word_at(q.codes, k / kPer * q.rows + row) >> (kBits * (k % kPer))) &
                                ((1u << kBits) - 1));
  }
  static void decode_line(const Quantized& q, int64_t row, int64_t first, int64_t size, float* to) {
    in_groups<Gptq>(q, row, first, size, to, [&q, row](int64_t k) { return static_cast<float>(stored(q, row, k)); });
  }
  static int shared_zero(const Quantized&) { return -1; }
  static uint8_t code(const Quantized& q, int64_t row, int64_t k)
    requires(kBits != 2)
  {
    return stored(q, row, k);
  }
};

// Words of eight rows, columns below each other.
struct Awq : GroupedIntegers<Awq> {
  static constexpr FormatTraits kTraits = {
      .name = "awq", .bits = 4, .block = 2, .scales = Scales::kByColumns, .zeros = Zeros::kWords, .row_step = 8};

  static Line line(const Quantized& q, int64_t row, int64_t group) {
    const uint32_t word = word_at(q.zeros, group * (q.rows / 8) + row / 8);
    return {static_cast<float>((word >> (4 * kAwqPlaces[row % 8])) & 15), scale_at(q, group * q.rows + row)};
  }
  static void decode_line(const Quantized& q, int64_t row, int64_t first, int64_t size, float* to) {
    in_groups<Awq>(q, row, first, size, to, [&q, row](int64_t k) { return static_cast<float>(code(q, row, k)); });
  }
  static int shared_zero(const Quantized&) { return -1; }
  static uint8_t code(const Quantized& q, int64_t row, int64_t k) {
    return (word_at(q.codes, k * (q.rows / 8) + row / 8) >> (4 * kAwqPlaces[row % 8])) & 15;
  }
};

// MXFP4 of two tensors: E2M1 times a power of two for each 32 columns.
struct Mxfp4 {
  static constexpr FormatTraits kTraits = {
      .name = "mxfp4", .block = 2, .scales = Scales::kByRows, .powers = true, .group = 32, .column_step = 32};
  static constexpr bool kPairs = true;

  static void decode_line(const Quantized& q, int64_t row, int64_t first, int64_t size, float* to) {
    const uint8_t* const from = q.codes + row * q.row_bytes;
    const auto* const powers = static_cast<const uint8_t*>(q.scales) + row * q.groups;
    for (int64_t k = first; k < first + size; ++k)
      *to++ = kTwiceE2m1[(from[k / 2] >> (4 * (k % 2))) & 15] * half_power_of(powers[k / 32]);
  }
  static IntegerForm form(const Quantized&) { return {32, 32, kPairs, 12, false, 24}; }
  static IntegerLine integer_line(const Quantized& q, int64_t row, int64_t k) {
    return {half_power_of(static_cast<const uint8_t*>(q.scales)[row * q.groups + k / 32]), 12};
  }
  static uint8_t code(const Quantized& q, int64_t row, int64_t k) {
    return kE2m1Codes[(q.codes[row * q.row_bytes + k / 2] >> (4 * (k % 2))) & 15];
  }
};

// NVFP4: E2M1 times an E4M3 scale for each 16 columns, which one number of the matrix multiplies or divides.
template <bool kDivides>
struct Nvfp4 {
  static constexpr FormatTraits kTraits = {.name = kDivides ? "nvfp4 divided" : "nvfp4",
                                           .block = 2,
                                           .scales = Scales::kByRows,
                                           .zeros = Zeros::kOne,
                                           .narrow = true,
                                           .group = 16,
                                           .column_step = 16};

  static float scale(const Quantized& q, int64_t row, int64_t group) {
    const float narrow = e4m3(static_cast<const uint8_t*>(q.scales)[row * q.groups + group]),
                factor = float_at(q.zeros);
    return kDivides ? narrow / factor : narrow * factor;
  }
  static void decode_line(const Quantized& q, int64_t row, int64_t first, int64_t size, float* to) {
    const uint8_t* const from = q.codes + row * q.row_bytes;
    for (int64_t k = first, end = first + size; k < end;) {
      const float by = scale(q, row, k / 16);
      for (const int64_t stop = std::min(end, (k / 16 + 1) * 16); k < stop; ++k)
        *to++ = 0.5f * kTwiceE2m1[(from[k / 2] >> (4 * (k % 2))) & 15] * by;
    }
  }
};

// MLX's affine groups: codes of a row as one string of bits, the lowest first; a number is code scale + bias.
template <int kBits>
struct Mlx {
  static constexpr FormatTraits kTraits = {.name = "mlx",
                                           .bits = kBits,
                                           .block = 32,
                                           .block_bytes = 4 * kBits,
                                           .scales = Scales::kByRows,
                                           .zeros = Zeros::kLikeScales,
                                           .column_step = 32};

  static uint32_t stored(const uint8_t* from, int64_t k) {
    const int64_t bit = k * kBits;
    uint32_t word = from[bit / 8];
    if (8 % kBits != 0 && bit % 8 + kBits > 8) word |= static_cast<uint32_t>(from[bit / 8 + 1]) << 8;
    return (word >> (bit % 8)) & ((1u << kBits) - 1);
  }
  static void decode_line(const Quantized& q, int64_t row, int64_t first, int64_t size, float* to) {
    const uint8_t* const from = q.codes + row * q.row_bytes;
    for (int64_t k = first, end = first + size; k < end;) {
      const int64_t at = row * q.groups + k / q.group;
      const float scale = scale_at(q, at), bias = number_at(q.zeros, q.scale_type, at);
      for (const int64_t stop = std::min(end, (k / q.group + 1) * q.group); k < stop; ++k)
        *to++ = static_cast<float>(stored(from, k)) * scale + bias;
    }
  }
};

// bitsandbytes: codes of sixteen numbers, the first of two in the upper bits, times a scale by groups of columns.
template <bool kNormal>
struct BitsAndBytes {
  static constexpr FormatTraits kTraits = {
      .name = kNormal ? "nf4" : "fp4", .block = 2, .scales = Scales::kByRows, .column_step = 2};

  static void decode_line(const Quantized& q, int64_t row, int64_t first, int64_t size, float* to) {
    const uint8_t* const from = q.codes + row * q.row_bytes;
    for (int64_t k = first, end = first + size; k < end;) {
      const float scale = scale_at(q, row * q.groups + k / q.group);
      for (const int64_t stop = std::min(end, (k / q.group + 1) * q.group); k < stop; ++k)
        *to++ = (kNormal ? kNf4 : kFp4)[(from[k / 2] >> (4 * (1 - k % 2))) & 15] * scale;
    }
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Blocks of columns with their scales: ggml's.

constexpr FormatTraits block_traits(const char* name, int64_t columns, int64_t bytes) {
  return {.name = name, .block = columns, .block_bytes = bytes, .column_step = columns};
}

template <class Format>
struct Blocks {
  static constexpr bool kPairs = false, kLeast = false;

  static const uint8_t* block_of(const Quantized& q, int64_t row, int64_t k) {
    constexpr FormatTraits kTraits = Format::kTraits;
    return q.codes + row * q.row_bytes + k / kTraits.block * kTraits.block_bytes;
  }
  static void decode_line(const Quantized& q, int64_t row, int64_t first, int64_t size, float* to) {
    constexpr int64_t kBlock = Format::kTraits.block;
    for (int64_t k = first, end = first + size; k < end;) {
      float block[kBlock];
      Format::decode(block_of(q, row, k), block);
      const int64_t skip = k % kBlock, some = std::min(kBlock - skip, end - k);
      std::copy_n(block + skip, some, to);
      to += some, k += some;
    }
  }
  static uint8_t code(const Quantized& q, int64_t row, int64_t k)
    requires requires(const uint8_t* block) { Format::code_in(block, 0); }
  {
    return Format::code_in(block_of(q, row, k), static_cast<int>(k % Format::kTraits.block));
  }
  static IntegerLine integer_line(const Quantized& q, int64_t row, int64_t k)
    requires requires(const uint8_t* block) { Format::scale_in(block); }
  {
    const uint8_t* const block = block_of(q, row, k);
    if constexpr (requires { Format::least_in(block); }) return {Format::scale_in(block), 0, Format::least_in(block)};
    return {Format::scale_in(block), Format::form(q).zero};
  }
};

// Codes of four bits, sixteen in the low halves of bytes before sixteen in the high ones.
inline uint32_t nibble(const uint8_t* codes, int i) { return (codes[i % 16] >> (i < 16 ? 0 : 4)) & 15; }
// The same with a fifth bit of its own.
inline uint32_t five_bits(const uint8_t* p, int i) { return nibble(p + 4, i) | ((p[i / 8] >> (i % 8)) & 1u) << 4; }

struct Q4_0 : Blocks<Q4_0> {
  static constexpr FormatTraits kTraits = block_traits("Q4_0", 32, 18);
  static void decode(const uint8_t* p, float* to) {
    const float scale = half_at(p);
    for (int i = 0; i < 32; ++i) to[i] = scale * (static_cast<float>(nibble(p + 2, i)) - 8.0f);
  }
  static IntegerForm form(const Quantized&) { return {32, 32, false, 8, false, 15}; }
  static uint8_t code_in(const uint8_t* p, int i) { return static_cast<uint8_t>(nibble(p + 2, i)); }
  static float scale_in(const uint8_t* p) { return half_at(p); }
};

struct Q4_1 : Blocks<Q4_1> {
  static constexpr FormatTraits kTraits = block_traits("Q4_1", 32, 20);
  static void decode(const uint8_t* p, float* to) {
    const float scale = half_at(p), least = half_at(p + 2);
    for (int i = 0; i < 32; ++i) to[i] = scale * static_cast<float>(nibble(p + 4, i)) + least;
  }
  static constexpr bool kLeast = true;
  static IntegerForm form(const Quantized&) { return {32, 32, false, 0, true, 15}; }
  static uint8_t code_in(const uint8_t* p, int i) { return static_cast<uint8_t>(nibble(p + 4, i)); }
  static float scale_in(const uint8_t* p) { return half_at(p); }
  static float least_in(const uint8_t* p) { return -half_at(p + 2); }
};

struct Q5_0 : Blocks<Q5_0> {
  static constexpr FormatTraits kTraits = block_traits("Q5_0", 32, 22);
  static void decode(const uint8_t* p, float* to) {
    const float scale = half_at(p);
    for (int i = 0; i < 32; ++i) to[i] = scale * (static_cast<float>(five_bits(p + 2, i)) - 16.0f);
  }
  static IntegerForm form(const Quantized&) { return {32, 32, false, 16, false, 31}; }
  static uint8_t code_in(const uint8_t* p, int i) { return static_cast<uint8_t>(five_bits(p + 2, i)); }
  static float scale_in(const uint8_t* p) { return half_at(p); }
};

struct Q5_1 : Blocks<Q5_1> {
  static constexpr FormatTraits kTraits = block_traits("Q5_1", 32, 24);
  static void decode(const uint8_t* p, float* to) {
    const float scale = half_at(p), least = half_at(p + 2);
    for (int i = 0; i < 32; ++i) to[i] = scale * static_cast<float>(five_bits(p + 4, i)) + least;
  }
  static constexpr bool kLeast = true;
  static IntegerForm form(const Quantized&) { return {32, 32, false, 0, true, 31}; }
  static uint8_t code_in(const uint8_t* p, int i) { return static_cast<uint8_t>(five_bits(p + 4, i)); }
  static float scale_in(const uint8_t* p) { return half_at(p); }
  static float least_in(const uint8_t* p) { return -half_at(p + 2); }
};

struct Q8_0 : Blocks<Q8_0> {
  static constexpr FormatTraits kTraits = block_traits("Q8_0", 32, 34);
  static void decode(const uint8_t* p, float* to) {
    const float scale = half_at(p);
    for (int i = 0; i < 32; ++i) to[i] = scale * static_cast<float>(static_cast<int8_t>(p[2 + i]));
  }
  static IntegerForm form(const Quantized&) { return {32, 32, false, 128, false}; }
  static uint8_t code_in(const uint8_t* p, int i) { return p[2 + i] ^ 0x80; }
  static float scale_in(const uint8_t* p) { return half_at(p); }
};

struct Iq4Nl : Blocks<Iq4Nl> {
  static constexpr FormatTraits kTraits = block_traits("IQ4_NL", 32, 18);
  static void decode(const uint8_t* p, float* to) {
    const float scale = half_at(p);
    for (int i = 0; i < 32; ++i) to[i] = scale * kIq4[nibble(p + 2, i)];
  }
};

struct Mxfp4Blocks : Blocks<Mxfp4Blocks> {
  static constexpr FormatTraits kTraits = block_traits("MXFP4", 32, 17);
  static void decode(const uint8_t* p, float* to) {
    const float scale = half_power_of(p[0]);
    for (int i = 0; i < 32; ++i) to[i] = scale * kDoubledE2m1[nibble(p + 1, i)];
  }
  static IntegerForm form(const Quantized&) { return {32, 32, false, 12, false, 24}; }
  static uint8_t code_in(const uint8_t* p, int i) { return kE2m1Codes[nibble(p + 1, i)]; }
  static float scale_in(const uint8_t* p) { return half_power_of(p[0]); }
};

struct Q2K : Blocks<Q2K> {
  static constexpr FormatTraits kTraits = block_traits("Q2_K", 256, 84);
  static void decode(const uint8_t* p, float* to) {
    const float scale = half_at(p + 80), least = half_at(p + 82);
    for (int i = 0; i < 256; ++i) {
      const float step = scale * static_cast<float>(p[i / 16] & 15);
      to[i] = step * static_cast<float>(piece(p + 16, 32, 2, i)) - least * static_cast<float>(p[i / 16] >> 4);
    }
  }
};

struct Q3K : Blocks<Q3K> {
  static constexpr FormatTraits kTraits = block_traits("Q3_K", 256, 110);
  static void decode(const uint8_t* p, float* to) {
    const float scale = half_at(p + 108);
    for (int i = 0; i < 256; ++i) {
      const float above = 1.0f - static_cast<float>(piece(p, 32, 1, i));
      const float code = static_cast<float>(piece(p + 32, 32, 2, i)) - 4.0f * above;
      to[i] = scale * q3_scale(p + 96, i / 16) * code;
    }
  }
};

// Q4_K and Q5_K: eight parts, each with a step and with something that is taken off.
template <class Format>
struct KBlocks : Blocks<Format> {
  static constexpr bool kLeast = true;  // something is taken off all numbers of a part
  static void decode(const uint8_t* p, float* to) {
    const KScales scales(p + 4);
    const float scale = half_at(p), least = half_at(p + 2);
    for (int i = 0; i < 256; ++i) {
      const float step = scale * scales.scale[i / 32], below = least * scales.least[i / 32];
      to[i] = step * static_cast<float>(Format::code_in(p, i)) - below;
    }
  }
  static IntegerForm form(const Quantized&) { return {256, 32, false, 0, true, 31}; }
  static IntegerParts parts(const uint8_t* p) {
    const KScales scales(p + 4);
    IntegerParts of = {half_at(p), half_at(p + 2), {}, {}};
    for (int i = 0; i < 8; ++i) of.steps[i] = scales.scale[i], of.lows[i] = scales.least[i];
    return of;
  }
};

struct Q4K : KBlocks<Q4K> {
  static constexpr FormatTraits kTraits = block_traits("Q4_K", 256, 144);
  static uint8_t code_in(const uint8_t* p, int i) { return static_cast<uint8_t>(piece(p + 16, 32, 4, i)); }
};

struct Q5K : KBlocks<Q5K> {
  static constexpr FormatTraits kTraits = block_traits("Q5_K", 256, 176);
  static uint8_t code_in(const uint8_t* p, int i) {
    return static_cast<uint8_t>(piece(p + 48, 32, 4, i) | piece(p + 16, 32, 1, i) << 4);
  }
};

struct Q6K : Blocks<Q6K> {
  static constexpr FormatTraits kTraits = block_traits("Q6_K", 256, 210);
  static void decode(const uint8_t* p, float* to) {
    const float scale = half_at(p + 208);
    for (int i = 0; i < 256; ++i) {
      const float step = scale * static_cast<float>(static_cast<int8_t>(p[192 + i / 16]));
      to[i] = step * (static_cast<float>(code_in(p, i)) - 32.0f);
    }
  }
  static IntegerForm form(const Quantized&) { return {256, 16, false, 32, false, 63}; }
  static IntegerParts parts(const uint8_t* p) {
    IntegerParts of = {half_at(p + 208), 0.0f, {}, {}};
    for (int i = 0; i < 16; ++i) of.steps[i] = static_cast<int8_t>(p[192 + i]);
    return of;
  }
  static uint8_t code_in(const uint8_t* p, int i) {
    return static_cast<uint8_t>(piece(p, 64, 4, i) | piece(p + 128, 32, 2, i) << 4);
  }
};

struct Iq4Xs : Blocks<Iq4Xs> {
  static constexpr FormatTraits kTraits = block_traits("IQ4_XS", 256, 136);
  static void decode(const uint8_t* p, float* to) {
    const float scale = half_at(p);
    for (int i = 0; i < 256; ++i) to[i] = scale * iq4_scale(p, i / 32) * kIq4[piece(p + 8, 16, 4, i)];
  }
};

struct Tq1_0 : Blocks<Tq1_0> {
  static constexpr FormatTraits kTraits = block_traits("TQ1_0", 256, 54);
  static void decode(const uint8_t* p, float* to) {
    const float scale = half_at(p + 52);
    // Ternary digits of `size` bytes, which are fractions of 256: first those of all bytes.
    const auto digits = [&](const uint8_t* from, int size, int count) {
      for (int digit = 0, power = 1; digit < count; ++digit, power *= 3)
        for (int i = 0; i < size; ++i)
          *to++ = scale * static_cast<float>((static_cast<uint8_t>(from[i] * power) * 3 >> 8) - 1);
    };
    digits(p, 32, 5), digits(p + 32, 16, 5), digits(p + 48, 4, 4);
  }
};

struct Tq2_0 : Blocks<Tq2_0> {
  static constexpr FormatTraits kTraits = block_traits("TQ2_0", 256, 66);
  static void decode(const uint8_t* p, float* to) {
    const float scale = half_at(p + 64);
    for (int i = 0; i < 256; ++i) to[i] = scale * (static_cast<float>(piece(p, 32, 2, i)) - 1.0f);
  }
};

// Blocks whose codes are indices of a codebook: eight(block, i) has the values from 8 i on, step(block, i) their step,
// which is a whole number times kFactor and the scale of the block. Times kFine values are whole numbers, smaller than
// kZero.
template <class Format>
struct PointBlocks : Blocks<Format> {
  static constexpr float kFine = 1.0f;
  static constexpr int64_t kPart = 16;
  static float scale_of(const uint8_t* p) { return half_at(p); }
  static void decode(const uint8_t* p, float* to) {
    const float scale = Format::scale_of(p) * Format::kFactor;
    for (int i = 0; i < 32; ++i)
      values_of(Format::eight(p, i), scale * static_cast<float>(Format::step(p, i)), to + 8 * i);
  }
  static IntegerForm form(const Quantized&) { return {256, kPart, false, Format::kZero, false, 2 * Format::kZero - 1}; }
  static IntegerParts parts(const uint8_t* p) {
    IntegerParts of = {Format::scale_of(p) * (Format::kFactor / Format::kFine), 0.0f, {}, {}};
    for (int i = 0; i < 16; ++i) of.steps[i] = Format::step(p, 2 * i);
    return of;
  }
  static std::array<uint8_t, 8> codes_in(const uint8_t* p, int i) {
    const Eight from = Format::eight(p, i);
    std::array<uint8_t, 8> codes;
    for (size_t j = 0; j < 8; ++j) {
      const auto value = static_cast<int>(Format::kFine * (static_cast<float>(from.point[j]) + from.shift));
      codes[j] = static_cast<uint8_t>(Format::kZero + (from.signs >> j & 1 ? -value : value));
    }
    return codes;
  }
  static uint8_t code_in(const uint8_t* p, int i) { return codes_in(p, i / 8)[static_cast<size_t>(i % 8)]; }
};

// Twice a scale of four bits, and one.
inline int odd_step(uint32_t scale) { return static_cast<int>(2 * scale + 1); }

// Of each part of 32 values four indices, four fields of signs and a scale.
struct Iq2Xxs : PointBlocks<Iq2Xxs> {
  static constexpr FormatTraits kTraits = block_traits("IQ2_XXS", 256, 66);
  static constexpr float kFactor = 0.125f;
  static constexpr int kZero = 64;
  static uint32_t packed(const uint8_t* p, int i) { return word_at(p + 2 + i / 4 * 8, 1); }
  static int step(const uint8_t* p, int i) { return odd_step(packed(p, i) >> 28); }
  static Eight eight(const uint8_t* p, int i) {
    return {codebooks::kIq2Xxs[p[2 + i / 4 * 8 + i % 4]], even_signs(packed(p, i) >> (i % 4 * 7))};
  }
};

struct Iq2Xs : PointBlocks<Iq2Xs> {
  static constexpr FormatTraits kTraits = block_traits("IQ2_XS", 256, 74);
  static constexpr float kFactor = 0.125f;
  static constexpr int kZero = 64;
  static int step(const uint8_t* p, int i) { return odd_step(piece(p + 66, 1, 4, i / 2)); }
  static Eight eight(const uint8_t* p, int i) {
    const uint32_t code = p[2 + 2 * i] | p[3 + 2 * i] << 8;
    return {codebooks::kIq2Xs[code & 511], even_signs(code >> 9)};
  }
};

struct Iq2S : PointBlocks<Iq2S> {
  static constexpr FormatTraits kTraits = block_traits("IQ2_S", 256, 82);
  static constexpr float kFactor = 0.125f;
  static constexpr int kZero = 64;
  static int step(const uint8_t* p, int i) { return odd_step(piece(p + 74, 1, 4, i / 2)); }
  static Eight eight(const uint8_t* p, int i) {
    return {codebooks::kIq2S[p[2 + i] | piece(p + 66, 1, 2, i) << 8], p[34 + i]};
  }
};

struct Iq3Xxs : PointBlocks<Iq3Xxs> {
  static constexpr FormatTraits kTraits = block_traits("IQ3_XXS", 256, 98);
  static constexpr float kFactor = 0.25f;
  static constexpr int kZero = 64;
  static int step(const uint8_t* p, int i) { return odd_step(word_at(p + 66, i / 4) >> 28); }
  static Eight eight(const uint8_t* p, int i) {
    const auto point = joined(codebooks::kIq3Xxs[p[2 + 2 * i]], codebooks::kIq3Xxs[p[3 + 2 * i]]);
    return {point, even_signs(word_at(p + 66, i / 4) >> (i % 4 * 7))};
  }
};

struct Iq3S : PointBlocks<Iq3S> {
  static constexpr FormatTraits kTraits = block_traits("IQ3_S", 256, 110);
  static constexpr float kFactor = 1.0f;
  static constexpr int kZero = 16;
  static int step(const uint8_t* p, int i) { return odd_step(piece(p + 106, 1, 4, i / 4)); }
  static Eight eight(const uint8_t* p, int i) {
    const auto point = [&](int code) -> const std::array<int8_t, 4>& {
      return codebooks::kIq3S[p[2 + code] | piece(p + 66, 1, 1, code) << 8];
    };
    return {joined(point(2 * i), point(2 * i + 1)), p[74 + i]};
  }
};

// Values of points are moved by an eighth, downwards or upwards.
inline float shift_of(bool lower) { return lower ? -0.125f : 0.125f; }

struct Iq1S : PointBlocks<Iq1S> {
  static constexpr FormatTraits kTraits = block_traits("IQ1_S", 256, 50);
  static constexpr float kFactor = 1.0f, kFine = 8.0f;
  static constexpr int kZero = 16;
  static uint32_t packed(const uint8_t* p, int i) { return p[34 + i / 4 * 2] | p[35 + i / 4 * 2] << 8; }
  static int step(const uint8_t* p, int i) { return odd_step(packed(p, i) >> 12 & 7); }
  static Eight eight(const uint8_t* p, int i) {
    const uint32_t part = packed(p, i);
    return {codebooks::kIq1[p[2 + i] | (part >> (i % 4 * 3) & 7) << 8], 0, shift_of(part >> 15 != 0)};
  }
};

struct Iq1M : PointBlocks<Iq1M> {
  static constexpr FormatTraits kTraits = block_traits("IQ1_M", 256, 56);
  static constexpr float kFactor = 1.0f, kFine = 8.0f;
  static constexpr int kZero = 16;
  // Four bits of the scale are in every other byte.
  static float scale_of(const uint8_t* p) {
    const uint8_t half[2] = {static_cast<uint8_t>(p[49] >> 4 | (p[51] & 0xf0)),
                             static_cast<uint8_t>(p[53] >> 4 | (p[55] & 0xf0))};
    return half_at(half);
  }
  static int step(const uint8_t* p, int i) {
    const uint32_t packed = p[48 + i / 8 * 2] | p[49 + i / 8 * 2] << 8;
    return odd_step(packed >> (i / 2 % 4 * 3) & 7);
  }
  static Eight eight(const uint8_t* p, int i) {
    const uint32_t code = piece(p + 32, 1, 4, i);
    return {codebooks::kIq1[p[i] | (code & 7) << 8], 0, shift_of((code & 8) != 0)};
  }
};

}  // namespace formats

// ---------------------------------------------------------------------------------------------------------------------

template <class... Format>
struct FormatList {
  // The place of a row: the same wherever the list is compiled, and of no other meaning.
  template <class Row>
  static constexpr int kIdOf = [] {
    int id = -1, index = 0;
    ((std::is_same_v<Row, Format> ? id = index : 0, ++index), ...);
    return id;
  }();

  static constexpr std::array<FormatTraits, sizeof...(Format)> traits() {
    const auto numbered = [](FormatTraits traits, int id) {
      traits.id = id;
      return traits;
    };
    return {numbered(Format::kTraits, kIdOf<Format>)...};
  }

  // by(Row()) of the row with an id.
  template <class F>
  static auto visit(int id, F&& by) {
    using Result = decltype(by(formats::Fp8()));
    if constexpr (std::is_void_v<Result>) {
      ((id == kIdOf<Format> ? by(Format()) : void()), ...);
    } else {
      Result result = {};
      ((id == kIdOf<Format> ? void(result = by(Format())) : void()), ...);
      return result;
    }
  }
};

using Formats =
    FormatList<formats::Fp8, formats::Int8, formats::Packed<2>, formats::Packed<4>, formats::Packed<8>,
               formats::Gptq<2>, formats::Gptq<4>, formats::Gptq<8>, formats::Awq, formats::Mxfp4,
               formats::Nvfp4<false>, formats::Nvfp4<true>, formats::Mlx<2>, formats::Mlx<3>, formats::Mlx<4>,
               formats::Mlx<5>, formats::Mlx<6>, formats::Mlx<8>, formats::BitsAndBytes<true>,
               formats::BitsAndBytes<false>, formats::Q4_0, formats::Q4_1, formats::Q5_0, formats::Q5_1, formats::Q8_0,
               formats::Q2K, formats::Q3K, formats::Q4K, formats::Q5K, formats::Q6K, formats::Iq4Nl, formats::Iq4Xs,
               formats::Mxfp4Blocks, formats::Tq1_0, formats::Tq2_0, formats::Iq2Xxs, formats::Iq2Xs, formats::Iq2S,
               formats::Iq3Xxs, formats::Iq3S, formats::Iq1S, formats::Iq1M>;

// by(Row()) of the format of a matrix: asked once for a matrix, not for its lines.
template <class F>
auto with_format(const Quantized& q, F&& by) {
  return Formats::visit(q.format->id, by);
}

using LineDecoder = void (*)(const Quantized&, int64_t row, int64_t first, int64_t size, float* to);

inline LineDecoder line_decoder(const Quantized& q) {
  return with_format(q, [](auto format) -> LineDecoder { return decltype(format)::decode_line; });
}

// Scales lie within blocks.
template <class Format>
constexpr bool kInBlocks = Format::kTraits.scales == Scales::kInBlocks;
// Codes are indices of a codebook.
template <class Format>
constexpr bool kHasPoints = requires(const uint8_t* block) { Format::eight(block, 0); };
// Parts of a block have steps of their own.
template <class Format>
constexpr bool kParted = requires(const uint8_t* block) { Format::parts(block); };
// Its numbers are whole ones times scales.
template <class Format>
constexpr bool kHasIntegers = requires(const Quantized& q) {
  Format::form(q);
  Format::code(q, 0, 0);
};
template <class Format>
constexpr bool kE2m1 = std::is_same_v<Format, formats::Mxfp4> || std::is_same_v<Format, formats::Mxfp4Blocks>;

}  // namespace
}  // namespace moelight
