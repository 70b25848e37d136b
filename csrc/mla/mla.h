// Latent decode attention in absorbed form over a paged cache: what goes in, and the face between the driver and an
// instruction set.
//
// Legend: B sequences, H query heads, R latent size, Rr size of the rotary part, W = R + Rr, P block size in tokens.
// Strides are in elements. A block of the cache is [P, W], contiguous: all heads share a row, whose first R elements
// are key and value at once.
#pragma once

#include <cstdint>

#include "gqa/gqa.h"

namespace moelight {

struct MlaArgs {
  DType dtype;
  int64_t batch, heads, latent, rotary, block_size;
  const void* q_latent;  // [B, H, R], rows of a sequence q_latent_stride apart
  int64_t q_latent_stride;
  const void* q_rotary;  // [B, H, Rr]
  int64_t q_rotary_stride;
  const void* cache;  // [blocks, P, W]
  int64_t cache_stride;
  const int32_t* tables;  // [B, max_blocks], rows table_stride apart
  int64_t table_stride;
  const int32_t* seq_lens;  // [B]
  float scale;
  void* out;  // [B, H, R], rows out_stride apart
  int64_t out_stride;
  int threads;
};

// Expects checked arguments: every needed table entry in range.
void mla_decode(const MlaArgs& args);

struct MlaAppendArgs {
  int64_t row_bytes, tokens, block_size;
  void* cache;
  int64_t cache_stride_bytes;
  const void* fresh;  // [T, W]
  int64_t fresh_stride_bytes;
  const int64_t* slots;  // [T]: block * P + offset
  int threads;
};

void mla_append(const MlaAppendArgs& args);

// A context is cut at multiples of kMlaChunk positions, and within a chunk summed by kMlaRows, or by kTileKeys: the
// order of summation of a sequence depends on nothing but its own length.
constexpr int64_t kMlaChunk = 1024;
constexpr int64_t kMlaRows = 48;

// The positions [begin, end) of a single chunk, for the heads [first_head, last_head).
struct MlaPiece {
  int64_t sequence, first_head, last_head, begin, end;
};

// What an instruction set provides, one entry per DType. Partials are as in gqa.h, but maxima and sums are of padded
// heads, and values [padded R / pad, heads, pad].
struct MlaKernels {
  int64_t pad;  // R, W and heads are padded to a multiple of this many floats
  int64_t (*scratch_floats)(int64_t heads, int64_t latent, int64_t rotary);
  // scratch: aligned to 64 bytes
  void (*attend[kDTypes])(const MlaArgs&, const MlaPiece&, float* scratch, const Partial&);
  // joins the partials of the piece's heads in order and writes them
  void (*merge[kDTypes])(const MlaArgs&, const MlaPiece&, const Partial* parts, int64_t count);
};

const MlaKernels& mla_scalar();
const MlaKernels& mla_avx2();
const MlaKernels& mla_avx512();
const MlaKernels& mla_neon();
const MlaKernels& mla_amx();
const MlaKernels& mla_emulated();  // of mla_amx, for processors with AVX512_BF16 but without tiles

}  // namespace moelight
