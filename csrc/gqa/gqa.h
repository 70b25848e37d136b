// Paged grouped-query decode attention: what goes in, and the face between the driver and an instruction set.
//
// Legend: B sequences, Hq query heads, Hkv key/value heads, G = Hq / Hkv, D head size, P block size in tokens.
// Strides are in elements. Within a block the layout is [Hkv, P, D], contiguous, and of scales [Hkv, P].
#pragma once

#include <cstdint>

#include "moelight/half.h"

namespace moelight {

struct GqaArgs {
  DType dtype;  // of q, out and, unless they are int8, the caches
  bool int8;    // caches of int8 with a scale for each row
  int64_t batch, q_heads, kv_heads, head_dim, block_size;
  const void* q;  // [B, Hq, D], rows q_stride apart
  int64_t q_stride;
  const void* k_cache;  // [blocks, Hkv, P, D]
  int64_t k_stride;
  const void* v_cache;
  int64_t v_stride;
  const float* k_scale;  // [blocks, Hkv, P] beside int8 caches
  int64_t k_scale_stride;
  const float* v_scale;
  int64_t v_scale_stride;
  const int32_t* tables;  // [B, max_blocks], rows table_stride apart
  int64_t table_stride;
  const int32_t* seq_lens;  // [B]
  float scale;
  float softcap;       // scores become softcap * tanh(score / softcap); 0 for none
  const float* sinks;  // [Hq]: a logit of each head that joins its softmax and is dropped; null for none
  int64_t window;      // last positions attended to; 0 means all
  const void* k_new;   // [B, Hkv, D]: written first, as by `kv_append`, at the last position of each sequence; or null
  int64_t k_new_stride;
  const void* v_new;
  int64_t v_new_stride;
  void* out;  // [B, Hq, D], rows out_stride apart
  int64_t out_stride;
  int threads;

  int64_t cache_bytes() const { return int8 ? 1 : dtype_bytes(dtype); }
};

// Expects checked arguments: head_dim a multiple of 8 up to kMaxHeadDim, block_size one of
// kBlockSizes, every needed table entry in range; with new rows, caches and scales that may be written.
void gqa_decode(const GqaArgs& args);

struct AppendArgs {
  DType dtype;  // of the new rows and, unless they are int8, the caches
  bool int8;
  int64_t tokens, kv_heads, head_dim, block_size;
  void* k_cache;
  int64_t k_stride;
  void* v_cache;
  int64_t v_stride;
  float* k_scale;  // written beside int8 caches
  int64_t k_scale_stride;
  float* v_scale;
  int64_t v_scale_stride;
  const void* k_new;  // [T, Hkv, D], rows k_new_stride apart
  int64_t k_new_stride;
  const void* v_new;
  int64_t v_new_stride;
  const int64_t* slots;  // [T]: block * P + offset; a token with a negative slot is left out
  int threads;
};

void kv_append(const AppendArgs& args);

constexpr int64_t kMaxHeadDim = 512;
constexpr int64_t kBlockSizes[] = {16, 32, 64, 128};

// A context is cut at multiples of kChunk tokens whatever the batch and the threads: the order of summation of a
// sequence depends on nothing but its own length.
constexpr int64_t kChunk = 512;

// Floats from one head's scores to the next; the slack also keeps the rows out of each other's cache sets.
constexpr int64_t kScoreRow = kChunk + 16;

// Some kv heads of one sequence, and the positions [begin, end) of a single chunk.
struct GqaPiece {
  int64_t sequence, first_head, last_head, begin, end;
};

// The softmax-weighted sum of a piece before division: per query head its maximum (base-2 logits), its sum of weights,
// and the weighted values, in the packed order of the instruction set.
struct Partial {
  float* maximum;  // [heads]
  float* sum;      // [heads]
  float* values;   // [heads, padded D]
};

// What an instruction set provides, one entry per DType.
struct GqaKernels {
  int64_t pad;  // heads are padded to a multiple of this many floats
  // scratch: for `heads` query heads gqa_scratch_floats(heads, padded D) floats, aligned to 64 bytes
  using Attend = void (*)(const GqaArgs&, const GqaPiece&, float* scratch, const Partial&);
  Attend attend[kDTypes], attend_int8[kDTypes];
  // joins the partials of the piece's heads in order and writes them
  using Merge = void (*)(const GqaArgs&, const GqaPiece&, const Partial* parts, int64_t count);
  Merge merge[kDTypes], merge_int8[kDTypes];
  // a row of `count` elements as codes -127 to 127 and their scale: largest magnitude / 127, not a number if that is
  // not finite
  void (*quantise[kDTypes])(const void* row, int64_t count, int8_t* codes, float* scale);
};

// Scores and packed query of each head, a factor of each, the scales of a chunk's keys and values.
constexpr int64_t gqa_scratch_floats(int64_t heads, int64_t padded) {
  return heads * (kScoreRow + padded + 1) + 2 * kScoreRow;
}

const GqaKernels& gqa_scalar();
const GqaKernels& gqa_avx2();
const GqaKernels& gqa_avx512();
const GqaKernels& gqa_neon();
const GqaKernels& gqa_avx512_bf16();  // AVX512_VNNI too
const GqaKernels& gqa_active();

}  // namespace moelight
