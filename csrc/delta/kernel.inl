// One head of a sequence, or some channels, over a SIMD type S. Included once by each instruction set's file.
//
// A column of a head's state depends on no other one: some columns at a time stay in the nearest cache while all rows
// pass them. The pass that writes the state of a row takes the product with the next row's key too, so that the state
// is read once a row.

#include <algorithm>
#include <cmath>

#include "delta.h"
#include "ffn/activation.h"
#include "moelight/simd_scalar.h"

namespace moelight {
namespace {

template <class T>
void widen(const T* x, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = to_float(x[i]);
}

template <class T>
void narrow(const float* x, int64_t count, T* out) {
  for (int64_t i = 0; i < count; ++i) from_float(x[i], out[i]);
}

// x [count] of length `length`, in `out`, which has room for whole vectors.
template <class S, class T>
void widen_normed(const T* x, int64_t count, float length, float* out) {
  constexpr float kEps = 1e-6f;
  widen(x, count, out);
  std::fill(out + count, out + padded_floats(count), 0.0f);
  auto squares = S::zero();
  for (int64_t i = 0; i < count; i += S::kWidth) {
    const auto value = S::load(out + i);
    squares = S::fma(value, value, squares);
  }
  const auto factor = S::set(length / std::sqrt(S::reduce_add(squares) + kEps));
  for (int64_t i = 0; i < count; i += S::kWidth) S::store(out + i, S::mul(S::load(out + i), factor));
}

// Some rows of a head, widened: [rows, padded Dk] and [rows, padded Dv].
struct DeltaRows {
  int64_t count, key_dim, value_dim, key_stride, value_stride;
  float *q, *k, *decay, *decayed_k;  // decayed_k = decay * k
  float *v, *out;
  const float* beta;
  int64_t beta_stride;
};

// kVectors vectors of columns from `column` on.
template <class S, int kVectors>
void columns(const DeltaRows& rows, float* state, int64_t column) {
  using V = typename S::V;
  constexpr int64_t kW = S::kWidth;
  float* const tile = state + column;
  V predicted[kVectors];
  for (int c = 0; c < kVectors; ++c) predicted[c] = S::zero();
  for (int64_t i = 0; i < rows.key_dim; ++i) {
    const V key = S::set(rows.decayed_k[i]);
    for (int c = 0; c < kVectors; ++c)
      predicted[c] = S::fma(S::load(tile + i * rows.value_dim + c * kW), key, predicted[c]);
  }
  for (int64_t t = 0; t < rows.count; ++t) {
    const V beta = S::set(rows.beta[t * rows.beta_stride]);
    const float* const v = rows.v + t * rows.value_stride + column;
    const float *const k = rows.k + t * rows.key_stride, *const q = rows.q + t * rows.key_stride;
    const float* const decay = rows.decay + t * rows.key_stride;
    const float* const next = rows.decayed_k + (t + 1 < rows.count ? t + 1 : t) * rows.key_stride;
    V change[kVectors], out[kVectors];
    for (int c = 0; c < kVectors; ++c) {
      change[c] = S::mul(S::sub(S::load(v + c * kW), predicted[c]), beta);
      out[c] = predicted[c] = S::zero();
    }
    for (int64_t i = 0; i < rows.key_dim; ++i) {
      const V key = S::set(k[i]), query = S::set(q[i]), factor = S::set(decay[i]), following = S::set(next[i]);
      float* const at = tile + i * rows.value_dim;
      for (int c = 0; c < kVectors; ++c) {
        const V s = S::fma(key, change[c], S::mul(S::load(at + c * kW), factor));
        S::store(at + c * kW, s);
        out[c] = S::fma(s, query, out[c]);
        predicted[c] = S::fma(s, following, predicted[c]);
      }
    }
    for (int c = 0; c < kVectors; ++c) S::store(rows.out + t * rows.value_stride + column + c * kW, out[c]);
  }
}

// The rows from `first` on, of one head.
template <class S, class T>
void load_rows(const DeltaArgs& args, int64_t first, int64_t head, DeltaRows& rows) {
  const int64_t key_head = head / (args.heads / args.key_heads);
  const float length = 1.0f / std::sqrt(static_cast<float>(args.key_dim));
  for (int64_t i = 0; i < rows.count; ++i) {
    const int64_t t = first + i, at = i * rows.key_stride;
    const auto* q = static_cast<const T*>(args.q) + t * args.q_stride + key_head * args.key_dim;
    const auto* k = static_cast<const T*>(args.k) + t * args.k_stride + key_head * args.key_dim;
    const auto* v = static_cast<const T*>(args.v) + t * args.v_stride + head * args.value_dim;
    widen_normed<S>(q, args.key_dim, length, rows.q + at);
    widen_normed<S>(k, args.key_dim, 1.0f, rows.k + at);
    widen(v, args.value_dim, rows.v + i * rows.value_stride);
    const float* const logarithms = args.decay + t * args.decay_stride + head * args.decays;
    float *const decay = rows.decay + at, *const decayed = rows.decayed_k + at;
    std::fill(decay, decay + rows.key_stride, logarithms[0]);
    if (args.decays > 1) std::copy(logarithms, logarithms + args.key_dim, decay);
    for (int64_t d = 0; d < args.key_dim; d += S::kWidth) {
      const auto factor = exp2<S>(S::mul(S::load(decay + d), S::set(kLog2E)));
      S::store(decay + d, factor);
      S::store(decayed + d, S::mul(factor, S::load(rows.k + at + d)));
    }
  }
}

template <class S, class T>
void rule(const DeltaArgs& args, int64_t sequence, int64_t head, float* scratch) {
  const int64_t end = args.starts[sequence + 1];
  const int64_t key_stride = padded_floats(args.key_dim), value_stride = padded_floats(args.value_dim);
  float* const state = args.states[sequence] + head * args.key_dim * args.value_dim;
  DeltaRows rows = {.count = 0,
                    .key_dim = args.key_dim,
                    .value_dim = args.value_dim,
                    .key_stride = key_stride,
                    .value_stride = value_stride,
                    .q = scratch,
                    .k = scratch + kDeltaRows * key_stride,
                    .decay = scratch + 2 * kDeltaRows * key_stride,
                    .decayed_k = scratch + 3 * kDeltaRows * key_stride,
                    .v = scratch + 4 * kDeltaRows * key_stride,
                    .out = scratch + 4 * kDeltaRows * key_stride + kDeltaRows * value_stride,
                    .beta = nullptr,
                    .beta_stride = args.beta_stride};
  for (int64_t first = args.starts[sequence]; first < end; first += kDeltaRows) {
    rows.count = std::min(kDeltaRows, end - first);
    rows.beta = args.beta + first * args.beta_stride + head;
    load_rows<S, T>(args, first, head, rows);
    constexpr int64_t kTile = S::kHeadTile * S::kWidth;
    int64_t column = 0;
    for (; column + kTile <= args.value_dim; column += kTile) columns<S, S::kHeadTile>(rows, state, column);
    for (; column + S::kWidth <= args.value_dim; column += S::kWidth) columns<S, 1>(rows, state, column);
    for (; column < args.value_dim; ++column) columns<Scalar, 1>(rows, state, column);
    for (int64_t i = 0; i < rows.count; ++i)
      narrow(rows.out + i * value_stride, args.value_dim,
             static_cast<T*>(args.out) + (first + i) * args.out_stride + head * args.value_dim);
  }
}

// silu of `count` numbers at x, rounded to T, as they would be one by one; x has room for whole vectors.
template <class S, class T>
void silu_rounded(float* x, int64_t count) {
  T rounded[kConvChannels];
  narrow(x, count, rounded);
  widen(rounded, count, x);
  for (int64_t i = 0; i < count; i += S::kWidth) {
    const auto value = S::load(x + i);
    S::store(x + i, S::mul(value, sigmoid<S>(value)));
  }
}

template <class S, class T>
void conv(const ConvArgs& args, const float* weights, const float* bias, int64_t sequence, int64_t first, int64_t count,
          float* scratch) {
  const int64_t taps = args.taps, begin = args.starts[sequence], end = args.starts[sequence + 1];
  T* const state = static_cast<T*>(args.states[sequence]) + first;
  float *ring[kMaxTaps], *const sums = scratch + taps * kConvChannels;
  std::fill(scratch, scratch + conv_scratch(taps), 0.0f);
  for (int64_t j = 0; j < taps; ++j) ring[j] = scratch + j * kConvChannels;
  for (int64_t j = 1; j < taps; ++j) widen(state + (j - 1) * args.channels, count, ring[j]);
  const int64_t full = count / S::kWidth * S::kWidth;
  const auto sum = [&](auto lanes, int64_t c) {
    using L = decltype(lanes);
    auto total = L::load(bias + first + c);
    for (int64_t j = 0; j < taps; ++j)
      total = L::fma(L::load(weights + j * args.channels + first + c), L::load(ring[j] + c), total);
    L::store(sums + c, total);
  };
  for (int64_t t = begin; t < end; ++t) {
    std::rotate(ring, ring + 1, ring + taps);
    widen(static_cast<const T*>(args.x) + t * args.x_stride + first, count, ring[taps - 1]);
    for (int64_t c = 0; c < full; c += S::kWidth) sum(S{}, c);
    for (int64_t c = full; c < count; ++c) sum(Scalar{}, c);
    if (args.silu) silu_rounded<S, T>(sums, count);
    narrow(sums, count, static_cast<T*>(args.out) + t * args.out_stride + first);
  }
  for (int64_t j = 1; j < taps; ++j) narrow(ring[j], count, state + (j - 1) * args.channels);
}

template <class S>
const DeltaKernels& kernels() {
  static const DeltaKernels table = {{conv<S, float>, conv<S, Bf16>, conv<S, Fp16>},
                                     {rule<S, float>, rule<S, Bf16>, rule<S, Fp16>}};
  return table;
}

}  // namespace
}  // namespace moelight
