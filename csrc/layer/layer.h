// One decoder layer, whole or on either side of its attention, for few tokens: kernels one after the other, without a
// return to the caller between them. Each is the kernel that serves by itself too, so results are theirs to the bit.
//
// Legend: T tokens, H hidden, Hq query heads, Hkv key/value heads, D head size, E experts, k experts of a token.
#pragma once

#include <cstdint>
#include <vector>

#include "ffn/ffn.h"
#include "gqa/gqa.h"

namespace moelight {

// The products of the same tokens with several matrices, their columns one after the other.
struct LayerProduct {
  std::vector<LinearArgs> parts;  // without tokens and threads
  bool wide = false;              // of tokens widened to float32, the results rounded once

  int64_t rows() const {
    int64_t count = 0;
    for (const LinearArgs& part : parts) count += part.format.rows;
    return count;
  }
};

// Without a weight there is no norm. `once`: weight and computation are float32, and only the result is rounded to the
// dtype of the layer.
struct Norm {
  const void* weight = nullptr;
  bool once = false;
};

// Norms and biases have the dtype of all activations, but for norms that are rounded once.
struct Layer {
  DType dtype;
  int64_t hidden, queries, keys, head_dim;  // of queries and keys: heads
  Norm input_norm, post_norm;               // [H], before attention and before the block
  Norm attention_norm, block_norm;          // [H], of the results of both before they are added; often none
  Norm q_norm, k_norm;                      // [D], or [Hq D] and [Hkv D] if `norms_all`; or none
  bool norms_all;                           // all queries of a token in one norm, and all keys
  float eps;
  LayerProduct qkv, o, router;  // a router without parts: a dense layer, all of whose tokens go to its only expert
  int64_t top_k;
  bool normalize, round;  // as of RouteArgs
  bool wide_block;        // of a dense layer: as `wide` of a projection

  bool dense() const { return router.parts.empty(); }
};

// Rows of an activation, `stride` elements apart.
struct Activations {
  void* data;
  int64_t tokens, stride;
};

// Half rotations of the tokens, [T, D], rows stride elements apart.
struct Rotation {
  const void *cos, *sin;
  int64_t cos_stride, sin_stride;
};

// qkv [T, (Hq + 2 Hkv) D] = the product of norm(hidden [T, H]), queries and keys normed and rotated.
void before_attention(const Layer& layer, const Activations& hidden, const Rotation& rotation, const Activations& qkv,
                      int threads);

// hidden [T, H] += o(attention [T, Hq D]); then += the experts of norm(hidden). `experts` are without rows, tokens and
// threads; rows [T k, H], one after the other, is their memory, which a dense layer does not use. Throws
// std::out_of_range, of a token's expert that has no weights, before any expert is computed.
void after_attention(const Layer& layer, const Activations& hidden, const Activations& attention,
                     const ExpertArgs& experts, const Activations& rows, int threads);

// hidden [T, H] through the whole layer, each token as the last of one of the sequences of `cache`, which is without
// queries, new rows, output and threads; else as the two above.
void decode_layer(const Layer& layer, const Activations& hidden, const Rotation& rotation, const GqaArgs& cache,
                  const ExpertArgs& experts, const Activations& rows, int threads);

}  // namespace moelight
