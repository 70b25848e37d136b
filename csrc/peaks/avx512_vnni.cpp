#include <immintrin.h>

#include "unit.inl"

namespace moelight {
namespace {

struct Avx512Vnni {
  using V = __m512i;
  static constexpr int kChains = 24;
  static constexpr double kFlop = 128;
  static V zero() { return _mm512_setzero_si512(); }
  static V add(V x, V y) { return _mm512_add_epi32(x, y); }
  static void multiply_add(V& sum) {
    const V ones = _mm512_set1_epi8(1);
    asm volatile("vpdpbusd %1, %1, %0" : "+v"(sum) : "v"(ones));
  }
};

}  // namespace

ProductUnit product_avx512_vnni() { return unit<Avx512Vnni>(); }

}  // namespace moelight
