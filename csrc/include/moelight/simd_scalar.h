// One lane, standard C++ only: what every processor runs, and the truth the others are compared with.
#pragma once

#include <cmath>
#include <cstdint>

#include "moelight/half.h"

namespace moelight {
namespace {

struct Scalar {
  using V = float;
  static constexpr int64_t kWidth = 1;
  static constexpr int kHeadTile = 2;

  static V zero() { return 0.0f; }
  static V set(float x) { return x; }
  static V load(const float* p) { return *p; }
  static void store(float* p, V x) { *p = x; }
  static V add(V x, V y) { return x + y; }
  static V sub(V x, V y) { return x - y; }
  static V mul(V x, V y) { return x * y; }
  static V fma(V x, V y, V z) { return x * y + z; }
  // The second operand wins when either is not a number, as on x86.
  static V max(V x, V y) { return x > y ? x : y; }
  static V round(V x) { return std::nearbyint(x); }
  static V scale(V x, V power) { return std::ldexp(x, static_cast<int>(power)); }
  static float reduce_add(V x) { return x; }
  static float reduce_max(V x) { return x; }
  static void sum4(V a, V b, V c, V d, float* out) { out[0] = a, out[1] = b, out[2] = c, out[3] = d; }

  template <class T>
  static void load2(const T* p, V& a, V& b) {
    a = to_float(p[0]), b = to_float(p[1]);
  }
  template <class T>
  static void load2_in_order(const T* p, V& a, V& b) {
    load2(p, a, b);
  }
  static void unzip(V a, V b, V& even, V& odd) { even = a, odd = b; }
  template <class T>
  static void store2(T* p, V a, V b) {
    from_float(a, p[0]), from_float(b, p[1]);
  }
  // A unit is two elements and divides every head size: there are no parts.
  template <class T>
  static void load2_part(const T* p, int64_t, V& a, V& b) {
    load2(p, a, b);
  }
  template <class T>
  static void store2_part(T* p, int64_t, V a, V b) {
    store2(p, a, b);
  }
};

}  // namespace
}  // namespace moelight
