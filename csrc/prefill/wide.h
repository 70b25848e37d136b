// How keys, values, queries and weights are laid out for products in float32, whatever they are stored as; over a SIMD
// type S. Elements of a head stay in the order in which S::load2 reads them ("packed order"), which S::store2 undoes:
// a product of two heads does not care.
#pragma once

#include <cstdint>

#include "prefill.h"
#include "product.h"

namespace moelight {
namespace {

template <class S, class T>
struct Wide {
  using Lanes = S;
  using Stored = T;
  using V = typename S::V;
  static constexpr int64_t kUnit = 2 * S::kWidth;
  static constexpr int64_t kKeysPerWord = 1;

  static V multiply_add(V a, V b, V sum) { return S::fma(a, b, sum); }

  // Words of one head in a product over the head, and in a product over the keys.
  static int64_t depth(int64_t head_dim) { return (head_dim + kUnit - 1) / kUnit * kUnit; }
  static int64_t lanes(int64_t head_dim) { return depth(head_dim); }

  static void pack_query(const T* q, int64_t head_dim, float* words) {
    const int64_t full = head_dim / kUnit * kUnit;
    V a, b;
    for (int64_t d = 0; d < full; d += kUnit) {
      S::load2(q + d, a, b);
      S::store(words + d, a), S::store(words + d + S::kWidth, b);
    }
    if (full == head_dim) return;
    S::load2_part(q + full, head_dim - full, a, b);
    S::store(words + full, a), S::store(words + full + S::kWidth, b);
  }

  // S::kWidth keys -> words[word][key], rows of words kKeyBlock apart. staging: S::kWidth * depth floats.
  static void pack_keys(const T* const* rows, int64_t head_dim, float* staging, float* words) {
    const int64_t stride = depth(head_dim);
    for (int64_t i = 0; i < S::kWidth; ++i) pack_query(rows[i], head_dim, staging + i * stride);
    for (int64_t d = 0; d < stride; d += S::kWidth) S::transpose(staging + d, stride, words + d * kKeyBlock, kKeyBlock);
  }

  // words[key][lane]
  static void pack_values(const T* const* rows, int64_t count, int64_t head_dim, float* words) {
    const int64_t stride = lanes(head_dim);
    for (int64_t i = 0; i < count; ++i) pack_query(rows[i], head_dim, words + i * stride);
  }

  // Weights of the keys [i, i + kUnit), where they were computed.
  static void pack_weights(V a, V b, float* words, int64_t i) {
    S::store(words + i, a), S::store(words + i + S::kWidth, b);
  }

  static void finish(const float* sums, V factor, int64_t head_dim, T* out) {
    const int64_t full = head_dim / kUnit * kUnit;
    for (int64_t d = 0; d < full; d += kUnit)
      S::store2(out + d, S::mul(S::load(sums + d), factor), S::mul(S::load(sums + d + S::kWidth), factor));
    if (full == head_dim) return;
    const V a = S::mul(S::load(sums + full), factor), b = S::mul(S::load(sums + full + S::kWidth), factor);
    S::store2_part(out + full, head_dim - full, a, b);
  }
};

}  // namespace
}  // namespace moelight
