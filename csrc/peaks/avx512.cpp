#include <immintrin.h>

#include "unit.inl"

namespace moelight {
namespace {

struct Avx512Unit {
  using V = __m512;
  static constexpr int kChains = 24;
  static constexpr double kFlop = 32;
  static V zero() { return _mm512_setzero_ps(); }
  static V add(V x, V y) { return _mm512_add_ps(x, y); }
  static void multiply_add(V& sum) {
    const V one = _mm512_set1_ps(1.0f);
    asm volatile("vfmadd231ps %1, %1, %0" : "+v"(sum) : "v"(one));
  }
};

}  // namespace

ProductUnit product_avx512() { return unit<Avx512Unit>(); }

}  // namespace moelight
