// Causal attention of ragged packed prompts: what goes in, and the face between the driver and an instruction set.
//
// Legend: S sequences, T tokens, Hq query heads, Hkv key/value heads, G = Hq / Hkv, D head size, P block size in
// tokens, C earlier positions of a sequence, which lie in the paged cache. Strides are in elements.
#pragma once

#include <cstdint>

#include "moelight/half.h"

namespace moelight {

struct PrefillArgs {
  DType dtype;
  int64_t sequences, q_heads, kv_heads, head_dim;
  const void* q;  // [T, Hq, D], rows q_stride apart
  int64_t q_stride;
  const void* k;  // [T, Hkv, D]
  int64_t k_stride;
  const void* v;
  int64_t v_stride;
  const int32_t* bounds;  // [S + 1]: sequence s owns rows bounds[s] to bounds[s + 1]
  float scale;
  int64_t window;          // last positions attended to, the current one included; 0 means all
  const float* sinks;      // [Hq]: logits that join the softmax and are dropped; may be null
  float softcap;           // logits become softcap * tanh(logit / softcap); 0 means as they are
  const int32_t* context;  // [S]: C of each sequence; null where there is no cache
  int64_t block_size;
  const void* k_cache;  // [blocks, Hkv, P, D], contiguous beyond the first dimension
  int64_t k_cache_stride;
  const void* v_cache;
  int64_t v_cache_stride;
  const float*
      k_scale;  // [blocks, Hkv, P], contiguous beyond the first dimension: the cache is int8 times these; may be null
  int64_t k_scale_stride;
  const float* v_scale;
  int64_t v_scale_stride;
  const int32_t* tables;  // [S, max_blocks], rows table_stride apart
  int64_t table_stride;
  void* out;  // [T, Hq, D], rows out_stride apart; may be q
  int64_t out_stride;
  int threads;
};

// Expects checked arguments: D a multiple of 8 up to 512, every needed table entry in range.
void prefill(const PrefillArgs& args);

// Keys are taken this many at a time, counted from position 0 of the sequence: a row's order of summation depends on
// its own position alone.
constexpr int64_t kKeyBlock = 64;

constexpr int64_t kMaxPrefillHeadDim = 512;

// Floats from one query row's scores to the next; the slack keeps rows out of each other's cache sets.
constexpr int64_t kPromptScoreRow = kKeyBlock + 16;

// Query rows (one token's query heads of a group follow each other) that share a pass over the keys.
constexpr int64_t kTileRows = 96;

// Some tokens of one (sequence, kv head): [begin, end), counted from the sequence's first row.
struct QueryTile {
  int64_t sequence, kv_head, begin, end;
};

// What an instruction set provides, one entry per DType.
struct PrefillKernels {
  int64_t (*scratch_floats)(int64_t head_dim, int64_t rows);
  // scratch: aligned to 64 bytes
  void (*attend[kDTypes])(const PrefillArgs&, const QueryTile&, float* scratch);
};

const PrefillKernels& prefill_scalar();
const PrefillKernels& prefill_avx2();
const PrefillKernels& prefill_avx512();
const PrefillKernels& prefill_neon();
const PrefillKernels& prefill_avx512_bf16();
const PrefillKernels& prefill_amx();
const PrefillKernels& prefill_emulated();  // of prefill_amx, for processors with AVX512_BF16 but without tiles

}  // namespace moelight
