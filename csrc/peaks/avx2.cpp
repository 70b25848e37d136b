#include <immintrin.h>

#include "unit.inl"

namespace moelight {
namespace {

struct Avx2Unit {
  using V = __m256;
  static constexpr int kChains = 12;
  static constexpr double kFlop = 16;
  static V zero() { return _mm256_setzero_ps(); }
  static V add(V x, V y) { return _mm256_add_ps(x, y); }
  static void multiply_add(V& sum) {
    const V one = _mm256_set1_ps(1.0f);
    asm volatile("vfmadd231ps %1, %1, %0" : "+x"(sum) : "x"(one));
  }
};

}  // namespace

ProductUnit product_avx2() { return unit<Avx2Unit>(); }

}  // namespace moelight
