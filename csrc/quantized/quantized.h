// Matrices whose numbers are quantised, as checkpoints store them, and the functions that unpack them.
//
// The formats are those of moelight/profiles/stored.py, the numbers those of moelight/kernels/quantized.py, to the bit:
// float32 by the same operations in the same order, rounded once where a narrower type is asked for. Nothing is read
// beyond the parts of a matrix whose sizes the binding checked, whatever their bytes say.
#pragma once

#include <cstdint>

#include "moelight/half.h"

namespace moelight {

// kMxBlocks is ggml's MXFP4, kMx that of two tensors; from kQ4_0 on the kinds are ggml's.
enum class Packing : int {
  kFp8,
  kInt8,
  kPacked,
  kGptq,
  kAwq,
  kMx,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ8_0,
  kQ2_K,
  kQ3_K,
  kQ4_K,
  kQ5_K,
  kQ6_K,
  kIq4Nl,
  kIq4Xs,
  kMxBlocks,
};
constexpr int kPackings = static_cast<int>(Packing::kMxBlocks) + 1;

// Numbers and bytes of a ggml block.
struct BlockSize {
  int64_t numbers, bytes;
};
constexpr BlockSize kStoredBlocks[] = {{32, 18},   {32, 20},   {32, 22},   {32, 24}, {32, 34},   {256, 84}, {256, 110},
                                       {256, 144}, {256, 176}, {256, 210}, {32, 18}, {256, 136}, {32, 17}};
constexpr bool in_blocks(Packing packing) { return packing >= Packing::kQ4_0; }
constexpr BlockSize block_size(Packing packing) {
  return kStoredBlocks[static_cast<int>(packing) - static_cast<int>(Packing::kQ4_0)];
}

enum class ScaleType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kPower = 3 };  // kPower: 2^(byte - 127)

struct Quantized {
  Packing packing;
  int bits;
  int64_t rows, columns;
  const uint8_t* codes;
  int64_t row_bytes;   // of codes; of transposed codes their share of one row
  const void* scales;  // [row groups, groups]; of kGptq and kAwq [groups, rows]; none in blocks
  ScaleType scale_type;
  const uint8_t* zeros;   // packed as the codes are, or null
  const int32_t* order;   // the group of each column, or null
  int64_t group, groups;  // columns that share a scale (at least columns: all), groups of them
  int64_t group_rows;     // rows that share a scale; 0: all
  int zero_bias;

  bool transposed() const { return packing == Packing::kGptq || packing == Packing::kAwq; }
};

// Asks memory for the scales and zero points of `count` rows from `row` on, where rows have their own.
inline void fetch_scales(const Quantized& q, int64_t row, int64_t count) {
  const bool own = q.packing == Packing::kPacked || q.packing == Packing::kMx || q.group_rows == 1;
  if (!own || q.transposed() || in_blocks(q.packing)) return;
  const int64_t size = q.scale_type == ScaleType::kFloat32 ? 4 : q.scale_type == ScaleType::kPower ? 1 : 2;
  const int64_t end = (row + count < q.rows ? row + count : q.rows) * q.groups;
  const auto* const scales = static_cast<const char*>(q.scales);
  for (int64_t at = row * q.groups; at < end; at += 64 / size) __builtin_prefetch(scales + at * size);
  if (q.zeros == nullptr || q.packing != Packing::kPacked) return;
  for (int64_t at = row * q.bits / 32 * q.groups; at * 32 < end * q.bits; at += 16)
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
