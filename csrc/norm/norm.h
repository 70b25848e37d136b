// What happens to a token's row between two products: root-mean-square norm, residual sum, rotary position.
//
// Legend: T tokens, G heads of a token (one for its whole row), H elements, D head size. Strides are in elements.
#pragma once

#include <cstdint>

#include "moelight/half.h"

namespace moelight {

struct NormArgs {
  DType dtype;
  int64_t tokens, groups, hidden;
  void* x;  // [T, G, H], tokens x_stride apart; written only where `add` is
  int64_t x_stride;
  const void* add;  // as x, or nothing: x += add first
  int64_t add_stride;
  const void* weight;  // [H]
  const void* gate;    // as x, or nothing: silu of it is a factor of the result
  int64_t gate_stride;
  float eps;
  void* out;  // [T, G, H], may be x
  int64_t out_stride;
  int threads;
};

void rms_norm(const NormArgs& args);

struct RotateArgs {
  DType dtype;
  int64_t tokens, heads, head_dim;  // head_dim is even
  const void* x;                    // [T, heads, D], tokens x_stride apart
  int64_t x_stride;
  const void *cos, *sin;  // [T, at least D / 2], rows stride apart
  int64_t cos_stride, sin_stride;
  void* out;  // [T, heads, D], may be x
  int64_t out_stride;
  int threads;
};

void rotate(const RotateArgs& args);

// What an instruction set provides, one entry per DType: the tokens [begin, end).
struct NormKernels {
  void (*norm[kDTypes])(const NormArgs&, int64_t begin, int64_t end);
  void (*rotate[kDTypes])(const RotateArgs&, int64_t begin, int64_t end);
};

const NormKernels& norm_scalar();
const NormKernels& norm_avx2();
const NormKernels& norm_avx512();
const NormKernels& norm_neon();

}  // namespace moelight
