// The weighted sum of each token's rows, over a SIMD type S. Included once by each instruction set's file. Products and
// sums are rounded one by one, never fused: every instruction set gives the same bits.

#include "moelight/simd_scalar.h"
#include "route.h"

namespace moelight {
namespace {

// Elements [d, d + 2 * S::kWidth) of one token.
template <class S, class T>
void sum_unit(const ScatterArgs& args, const int32_t* position, const float* weights, int64_t d, T* out) {
  auto a = S::zero(), b = S::zero();
  for (int64_t r = 0; r < args.top_k; ++r) {
    if (position[r] < 0) continue;
    typename S::V x, y;
    S::load2(static_cast<const T*>(args.rows) + position[r] * args.row_stride + d, x, y);
    const auto weight = S::set(weights[r]);
    a = S::add(a, S::mul(x, weight)), b = S::add(b, S::mul(y, weight));
  }
  if (args.residual) {
    T rounded[2 * S::kWidth];
    typename S::V x, y;
    S::store2(rounded, a, b);
    S::load2(rounded, a, b);
    S::load2(out + d, x, y);
    a = S::add(x, a), b = S::add(y, b);
  }
  S::store2(out + d, a, b);
}

template <class T>
void sum_last(const ScatterArgs& args, const int32_t* position, const float* weights, int64_t d, T* out) {
  float total = 0.0f;
  for (int64_t r = 0; r < args.top_k; ++r)
    if (position[r] >= 0)
      total += to_float(static_cast<const T*>(args.rows)[position[r] * args.row_stride + d]) * weights[r];
  if (args.residual) {
    T rounded;
    from_float(total, rounded);
    total = to_float(out[d]) + to_float(rounded);
  }
  from_float(total, out[d]);
}

template <class S, class T>
void sum_tokens(const ScatterArgs& args, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    const int32_t* position = args.position + t * args.position_stride;
    const float* weights = args.weights + t * args.weight_stride;
    T* out = static_cast<T*>(args.out) + t * args.out_stride;
    int64_t d = 0;
    for (; d + 2 * S::kWidth <= args.hidden; d += 2 * S::kWidth) sum_unit<S>(args, position, weights, d, out);
    for (; d + 2 <= args.hidden; d += 2) sum_unit<Scalar>(args, position, weights, d, out);
    if (d < args.hidden) sum_last(args, position, weights, d, out);
  }
}

template <class S>
const ScatterKernels& kernels() {
  static const ScatterKernels table = {{sum_tokens<S, float>, sum_tokens<S, Bf16>, sum_tokens<S, Fp16>}};
  return table;
}

}  // namespace
}  // namespace moelight
