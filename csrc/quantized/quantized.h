// Matrices whose numbers are quantised, as checkpoints store them, and the functions that unpack them.
//
// The formats are those of moelight/profiles/stored.py, the numbers those of moelight/kernels/quantized.py, to the bit:
// float32 by the same operations in the same order, rounded once where a narrower type is asked for. Nothing is read
// beyond the parts of a matrix whose sizes the binding checked, whatever their bytes say.
#pragma once

#include <cstdint>

#include "moelight/half.h"

namespace moelight {

// Where the scales of a matrix lie, and its zero points as they do: within its blocks; one for each tile of rows and
// columns; by rows; or by columns, as its codes do.
enum class Scales { kInBlocks, kByTiles, kByRows, kByColumns };
// What goes with the scales. Zero points: none; a byte each; or as many in a word as codes. Or in their place: numbers
// like the scales, which are added to codes times scales; or one float32 of all scales.
enum class Zeros { kNone, kBytes, kWords, kLikeScales, kOne };

// What anyone may ask of a format; the formats, and what only an instruction set's own code can do, are in formats.h.
struct FormatTraits {
  const char* name;         // by which moelight/kernels/quantized.py lends it
  int bits = 8;             // of a code; those of one name differ in it
  int64_t block = 1;        // columns of the smallest piece of a row
  int64_t block_bytes = 1;  // bytes of its codes
  Scales scales = Scales::kInBlocks;
  Zeros zeros = Zeros::kNone;
  bool powers = false;                    // scales are powers of two
  bool narrow = false;                    // scales are E4M3
  bool ordered = false;                   // columns may name their groups
  int64_t group = 0;                      // columns that share a scale; 0: the matrix says
  int64_t row_step = 1, column_step = 1;  // rows and columns are multiples of these
  int id = -1;                            // the place in formats.h
};

enum class ScaleType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kPower = 3 };  // kPower: 2^(byte - 127)

struct Quantized {
  const FormatTraits* format;
  int64_t rows, columns;
  const uint8_t* codes;
  int64_t row_bytes;   // of codes; of transposed codes their share of one row
  const void* scales;  // [row groups, groups], or [groups, rows] by columns; none in blocks
  ScaleType scale_type;
  const uint8_t* zeros;   // as the format's Zeros say, or null
  const int32_t* order;   // the group of each column, or null
  int64_t group, groups;  // columns that share a scale (at least columns: all), groups of them
  int64_t group_rows;     // rows that share a scale; 0: all
  int zero_bias;

  bool transposed() const { return format->scales == Scales::kByColumns; }
};

// Asks memory for the scales and zero points of `count` rows from `row` on, where rows have their own.
inline void fetch_scales(const Quantized& q, int64_t row, int64_t count) {
  const FormatTraits& format = *q.format;
  if (format.scales != Scales::kByRows && (format.scales != Scales::kByTiles || q.group_rows != 1)) return;
  const int64_t size = q.scale_type == ScaleType::kFloat32 ? 4 : q.scale_type == ScaleType::kPower ? 1 : 2;
  const int64_t end = (row + count < q.rows ? row + count : q.rows) * q.groups;
  const auto* const scales = static_cast<const char*>(q.scales);
  for (int64_t at = row * q.groups; at < end; at += 64 / size) __builtin_prefetch(scales + at * size);
  if (q.zeros == nullptr || format.zeros != Zeros::kWords) return;
  for (int64_t at = row * format.bits / 32 * q.groups; at * 32 < end * format.bits; at += 16)
    __builtin_prefetch(q.zeros + 4 * at);
}

// The most columns that are unpacked at once, and numbers whose zeros are written out after the last column.
constexpr int64_t kMostColumns = 1024, kUnpackStep = 32;

// Columns [first, first + size) of `rows` rows from `row` on, as numbers in lines to_bytes apart, and zeros up to the
// next multiple of kUnpackStep; `first` is a multiple of 64, size at most kMostColumns. What lies `lead` bytes after
// the codes that are read is fetched meanwhile.
using Unpack = void (*)(const Quantized& from, int64_t row, int64_t rows, int64_t first, int64_t size, int64_t lead,
                        void* to, int64_t to_bytes);

// sums[c * stride + r] += x[c] . row r, of at most summed_rows() rows from `row` on and the first `tokens` tokens. The
// tokens lie beside each other, line k of all, then line k + 1 (ffn/pairs.h); kUnpackStep divides the columns.
using SumRows = void (*)(const Quantized& from, int64_t row, int64_t rows, const char* x, int64_t lead, int64_t tokens,
                         float* sums, int64_t stride);
constexpr int summed_rows(int64_t tokens) { return tokens == 1 ? 8 : 4; }

// What is done with matrices of one format: null where rows cannot be summed as they are unpacked.
struct Unpacking {
  Unpack unpack = nullptr;
  SumRows one = nullptr, two = nullptr, four = nullptr;  // tokens
};

Unpack unpack_scalar(DType to);
Unpack unpack_avx2(DType to);
Unpack unpack_avx512(DType to);
Unpack unpack_neon(DType to);
// Lines of Pairs and of Halves, for products that take subnormal numbers as zeros: here they may be.
Unpacking unpacking_pairs(const Quantized& like);
Unpacking unpacking_bytes(const Quantized& like);  // unpacking_pairs by AVX512_VBMI
Unpacking unpacking_halves(const Quantized& like);

// out[row][column] of all rows, `stride` numbers apart.
void dequantize(const Quantized& from, DType type, void* out, int64_t stride, int threads);

}  // namespace moelight
