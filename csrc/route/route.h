// Routing: the experts of each token, its rows sorted by expert, and the weighted sum back.
//
// Legend: T tokens, E experts, k experts per token, H hidden size, R = T * k routed rows (token * k + rank).
// Strides are in elements.
#pragma once

#include <cstdint>

#include "moelight/half.h"

namespace moelight {

struct RouteArgs {
  DType dtype;
  int64_t tokens, experts, top_k;  // 1 <= top_k <= experts
  const void* logits;              // [T, E], rows stride apart
  int64_t stride;
  bool normalize;  // a token's weights sum to one
  bool round;      // weights are rounded to the dtype of the logits
  float* weights;  // [T, k], contiguous
  int32_t* ids;    // [T, k], contiguous, ascending
  int threads;
};

// One piece of code for every processor: a token's experts do not depend on the instruction set.
void route(const RouteArgs& args);

struct SortArgs {
  int64_t tokens, experts, top_k;
  const int32_t* ids;  // [T, k], rows stride apart, each in [0, E)
  int64_t stride;
  int32_t* order;     // [R]: routed rows by expert, then token
  int32_t* token;     // [R]: order / k
  int32_t* position;  // [T, k]: where in `order` a routed row is
  int32_t* offsets;   // [E + 1]: expert e owns order[offsets[e]] to order[offsets[e + 1]]
};

void sort_by_expert(const SortArgs& args);

struct GatherArgs {
  int64_t row_bytes, rows;
  const char* x;  // [T, H], rows x_stride bytes apart
  int64_t x_stride;
  const int32_t* token;  // [R]
  char* out;             // [R, H], rows out_stride bytes apart
  int64_t out_stride;
  int threads;
};

void gather_rows(const GatherArgs& args);

struct ScatterArgs {
  DType dtype;
  int64_t tokens, top_k, hidden;
  const void* rows;  // [R, H], rows row_stride apart
  int64_t row_stride;
  const int32_t* position;  // [T, k], rows position_stride apart; a negative one adds nothing
  int64_t position_stride;
  const float* weights;  // [T, k], rows weight_stride apart
  int64_t weight_stride;
  void* out;  // [T, H], rows out_stride apart
  int64_t out_stride;
  bool residual;  // the sum, rounded to the dtype, is added to what `out` holds
  int threads;
};

void scatter_sum(const ScatterArgs& args);

// What an instruction set provides, one entry per DType: the tokens [begin, end).
struct ScatterKernels {
  void (*sum[kDTypes])(const ScatterArgs&, int64_t begin, int64_t end);
};

const ScatterKernels& scatter_scalar();
const ScatterKernels& scatter_avx2();
const ScatterKernels& scatter_avx512();
const ScatterKernels& scatter_neon();

}  // namespace moelight
