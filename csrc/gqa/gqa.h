// Paged grouped-query decode attention: what goes in, and the face between the driver and an instruction set.
//
// Legend: B sequences, Hq query heads, Hkv key/value heads, G = Hq / Hkv, D head size, P block size in tokens.
// Strides are in elements. Within a block the layout is [Hkv, P, D], contiguous.
#pragma once

#include <cstdint>

#include "moelight/half.h"

namespace moelight {

struct GqaArgs {
  DType dtype;
  int64_t batch, q_heads, kv_heads, head_dim, block_size;
  const void* q;  // [B, Hq, D], rows q_stride apart
  int64_t q_stride;
  const void* k_cache;  // [blocks, Hkv, P, D]
  int64_t k_stride;
  const void* v_cache;
  int64_t v_stride;
  const int32_t* tables;  // [B, max_blocks], rows table_stride apart
  int64_t table_stride;
  const int32_t* seq_lens;  // [B]
  float scale;
  int64_t window;  // last positions attended to; 0 means all
  void* out;       // [B, Hq, D], rows out_stride apart
  int64_t out_stride;
  int threads;
};

// Expects checked arguments: head_dim a multiple of 8 up to kMaxHeadDim, every needed table entry in range.
void gqa_decode(const GqaArgs& args);

struct AppendArgs {
  int64_t element_bytes, tokens, kv_heads, head_dim, block_size;
  void* k_cache;
  int64_t k_stride;
  void* v_cache;
  int64_t v_stride;
  const void* k_new;  // [T, Hkv, D], rows k_new_stride apart
  int64_t k_new_stride;
  const void* v_new;
  int64_t v_new_stride;
  const int64_t* slots;  // [T]: block * P + offset
  int threads;
};

void kv_append(const AppendArgs& args);

constexpr int64_t kMaxHeadDim = 256;

// A context is cut at multiples of kChunk tokens whatever the batch and the threads: the order of summation of a
// sequence depends on nothing but its own length.
constexpr int64_t kChunk = 512;

// Floats from one head's scores to the next; the slack also keeps the rows out of each other's cache sets.
constexpr int64_t kScoreRow = kChunk + 16;

// One (sequence, kv head, chunk): the positions [begin, end) of a single chunk.
struct Piece {
  int64_t sequence, kv_head, begin, end;
};

// The softmax-weighted sum of a piece before division: per query head of the group its maximum (base-2 logits), its
// sum of weights, and the weighted values, in the packed order of the instruction set.
struct Partial {
  float* maximum;  // [G]
  float* sum;      // [G]
  float* values;   // [G, padded D]
};

// What an instruction set provides, one entry per DType.
struct GqaKernels {
  int64_t pad;  // heads are padded to a multiple of this many floats
  // scratch: G * (kScoreRow + padded D) floats, aligned to 64 bytes
  void (*attend[kDTypes])(const GqaArgs&, const Piece&, float* scratch, const Partial&);
  // joins the partials of one (sequence, kv head) in order and writes the heads of the group
  void (*merge[kDTypes])(const GqaArgs&, int64_t sequence, int64_t kv_head, const Partial* parts, int64_t count);
};

const GqaKernels& gqa_scalar();
const GqaKernels& gqa_avx2();
const GqaKernels& gqa_avx512();

}  // namespace moelight
