// Linear attention by the gated delta rule, and the causal convolution before it, over the rows of several sequences.
//
// Legend: B sequences, T rows, of which sequence b has starts[b] to starts[b + 1]; C channels, K taps; Hk heads of
// queries and keys, H heads of values (a multiple of Hk), Dk and Dv their sizes. Strides are in elements. The result of
// a row depends on its sequence alone, and not on where the rows of that are cut into calls.
#pragma once

#include <cstdint>

#include "moelight/half.h"

namespace moelight {

struct ConvArgs {
  DType dtype;
  int64_t sequences, channels, taps;  // taps is at most kMaxTaps
  const int32_t* starts;              // [B + 1]
  const void* x;                      // [T, C]
  int64_t x_stride;
  const void* weight;   // [C, K]
  const void* bias;     // [C], or nothing
  void* const* states;  // of each sequence [K - 1, C]: the rows before its first; the last ones afterwards
  bool silu;
  void* out;  // [T, C]
  int64_t out_stride;
  int threads;
};

constexpr int64_t kMaxTaps = 16;

// out[t][c] = bias[c] + sum over j of weight[c][j] x[t - K + 1 + j][c], rounded, then silu of it if asked for.
void causal_conv(const ConvArgs& args);

struct DeltaArgs {
  DType dtype;
  int64_t sequences, key_heads, heads, key_dim, value_dim;
  const int32_t* starts;  // [B + 1]
  const void *q, *k, *v;  // [T, Hk, Dk], [T, Hk, Dk], [T, H, Dv], rows stride apart
  int64_t q_stride, k_stride, v_stride;
  const float* decay;  // [T, H, 1 or Dk]: logarithms
  int64_t decay_stride, decays;
  const float* beta;  // [T, H]
  int64_t beta_stride;
  float* const* states;  // of each sequence [H, Dk, Dv]
  void* out;             // [T, H, Dv]
  int64_t out_stride;
  int threads;
};

// Of each head and row, with q and k of length 1 and q divided by the root of Dk:
//   S <- exp(decay) S;  S <- S + k (beta (v - S^T k))^T;  out <- S^T q
void delta_rule(const DeltaArgs& args);

// What an instruction set provides, one entry per DType.
struct DeltaKernels {
  // The channels [first, first + count) of a sequence; weights float [K, C] and bias float [C]; scratch of
  // conv_scratch(taps) floats.
  void (*conv[kDTypes])(const ConvArgs&, const float* weights, const float* bias, int64_t sequence, int64_t first,
                        int64_t count, float* scratch);
  // A head of a sequence; scratch of delta_scratch(args) floats.
  void (*rule[kDTypes])(const DeltaArgs&, int64_t sequence, int64_t head, float* scratch);
};

constexpr int64_t kConvChannels = 256;  // of a task
constexpr int64_t kDeltaRows = 16;      // of which queries, keys and values are widened at a time

constexpr int64_t padded_floats(int64_t count) { return (count + 15) / 16 * 16; }
constexpr int64_t conv_scratch(int64_t taps) { return (taps + 2) * kConvChannels; }
inline int64_t delta_scratch(const DeltaArgs& args) {
  return kDeltaRows * (4 * padded_floats(args.key_dim) + 2 * padded_floats(args.value_dim));
}

const DeltaKernels& delta_scalar();
const DeltaKernels& delta_avx2();
const DeltaKernels& delta_avx512();
const DeltaKernels& delta_neon();

}  // namespace moelight
