// Norm and rotation of one row at a time, over a SIMD type S. Included once by each instruction set's file. Numbers are
// rounded to T wherever Hugging Face transformers rounds them.

#include <cmath>
#include <cstring>
#include <type_traits>

#include "ffn/activation.h"
#include "norm.h"

namespace moelight {
namespace {

template <class S>
constexpr int64_t kUnit = 2 * S::kWidth;

// The `count` elements at p, zeros after them.
template <class S, class T>
void load(const T* p, int64_t count, typename S::V& a, typename S::V& b) {
  if (count == kUnit<S>) return S::load2(p, a, b);
  T buffer[kUnit<S>] = {};
  std::memcpy(buffer, p, static_cast<size_t>(count) * sizeof(T));
  S::load2(buffer, a, b);
}

template <class S, class T>
void store(T* p, int64_t count, typename S::V a, typename S::V b) {
  if (count == kUnit<S>) return S::store2(p, a, b);
  T buffer[kUnit<S>];
  S::store2(buffer, a, b);
  std::memcpy(p, buffer, static_cast<size_t>(count) * sizeof(T));
}

template <class S, class T>
void round(typename S::V& a, typename S::V& b) {
  if constexpr (!std::is_same_v<T, float>) {
    T rounded[kUnit<S>];
    S::store2(rounded, a, b);
    S::load2(rounded, a, b);
  }
}

// unit(first, count) over n elements; only the last count is less than a unit.
template <class S, class F>
void over_units(int64_t n, F&& unit) {
  int64_t d = 0;
  for (; d + kUnit<S> <= n; d += kUnit<S>) unit(d, kUnit<S>);
  if (d < n) unit(d, n - d);
}

template <class S, class T>
void norm_row(T* x, const T* add, const T* weight, const T* gate, int64_t n, float eps, T* out) {
  auto even = S::zero(), odd = S::zero();
  over_units<S>(n, [&](int64_t d, int64_t count) {
    typename S::V a, b, c, e;
    load<S>(x + d, count, a, b);
    if (add) {
      load<S>(add + d, count, c, e);
      a = S::add(a, c), b = S::add(b, e);
      round<S, T>(a, b);
      store<S>(x + d, count, a, b);
    }
    even = S::fma(a, a, even), odd = S::fma(b, b, odd);
  });
  const float mean = S::reduce_add(S::add(even, odd)) / static_cast<float>(n);
  const auto factor = S::set(1.0f / std::sqrt(mean + eps));
  over_units<S>(n, [&](int64_t d, int64_t count) {
    typename S::V a, b, c, e;
    load<S>(x + d, count, a, b);
    load<S>(weight + d, count, c, e);
    a = S::mul(a, factor), b = S::mul(b, factor);
    round<S, T>(a, b);
    a = S::mul(a, c), b = S::mul(b, e);
    if (gate) {
      round<S, T>(a, b);
      load<S>(gate + d, count, c, e);
      a = S::mul(a, Silu<S>::apply(c, 1.0f)), b = S::mul(b, Silu<S>::apply(e, 1.0f));
    }
    store<S>(out + d, count, a, b);
  });
}

template <class S, class T>
void norm_tokens(const NormArgs& args, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t g = 0; g < args.groups; ++g) {
      const int64_t first = g * args.hidden;
      norm_row<S>(static_cast<T*>(args.x) + t * args.x_stride + first,
                  args.add ? static_cast<const T*>(args.add) + t * args.add_stride + first : nullptr,
                  static_cast<const T*>(args.weight),
                  args.gate ? static_cast<const T*>(args.gate) + t * args.gate_stride + first : nullptr, args.hidden,
                  args.eps, static_cast<T*>(args.out) + t * args.out_stride + first);
    }
  }
}

// Element i turns with element i + half.
template <class S, class T>
void rotate_head(const T* x, const T* cos, const T* sin, int64_t half, T* out) {
  over_units<S>(half, [&](int64_t d, int64_t count) {
    typename S::V a, b, u, v, c, e, s, t;
    load<S>(x + d, count, a, b), load<S>(x + half + d, count, u, v);
    load<S>(cos + d, count, c, e), load<S>(sin + d, count, s, t);
    auto turned = [&](auto left, auto right, auto&& join, T* p) {
      typename S::V lc = S::mul(left[0], c), le = S::mul(left[1], e);
      typename S::V rs = S::mul(right[0], s), rt = S::mul(right[1], t);
      round<S, T>(lc, le), round<S, T>(rs, rt);
      store<S>(p, count, join(lc, rs), join(le, rt));
    };
    const typename S::V first[] = {a, b}, second[] = {u, v};
    turned(first, second, [](auto l, auto r) { return S::sub(l, r); }, out + d);
    turned(second, first, [](auto l, auto r) { return S::add(l, r); }, out + half + d);
  });
}

template <class S, class T>
void rotate_tokens(const RotateArgs& args, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    const T* cos = static_cast<const T*>(args.cos) + t * args.cos_stride;
    const T* sin = static_cast<const T*>(args.sin) + t * args.sin_stride;
    for (int64_t h = 0; h < args.heads; ++h) {
      const int64_t first = h * args.head_dim;
      rotate_head<S>(static_cast<const T*>(args.x) + t * args.x_stride + first, cos, sin, args.head_dim / 2,
                     static_cast<T*>(args.out) + t * args.out_stride + first);
    }
  }
}

template <class S>
const NormKernels& kernels() {
  static const NormKernels table = {{norm_tokens<S, float>, norm_tokens<S, Bf16>, norm_tokens<S, Fp16>},
                                    {rotate_tokens<S, float>, rotate_tokens<S, Bf16>, rotate_tokens<S, Fp16>}};
  return table;
}

}  // namespace
}  // namespace moelight
