#include <immintrin.h>

#include "unit.inl"

namespace moelight {
namespace {

struct AvxVnni {
  using V = __m256i;
  static constexpr int kChains = 12;
  static constexpr double kFlop = 64;
  static V zero() { return _mm256_setzero_si256(); }
  static V add(V x, V y) { return _mm256_add_epi32(x, y); }
  static void multiply_add(V& sum) {
    const V ones = _mm256_set1_epi8(1);
    asm volatile("%{vex%} vpdpbusd %1, %1, %0" : "+x"(sum) : "x"(ones));
  }
};

}  // namespace

ProductUnit product_avx_vnni() { return unit<AvxVnni>(); }

}  // namespace moelight
