#include <immintrin.h>

#include "unit.inl"

namespace moelight {
namespace {

struct Avx512Bf16 {
  using V = __m512;
  static constexpr int kChains = 24;
  static constexpr double kFlop = 64;
  static V zero() { return _mm512_setzero_ps(); }
  static V add(V x, V y) { return _mm512_add_ps(x, y); }
  static void multiply_add(V& sum) {
    const __m512i ones = _mm512_set1_epi32(0x3f803f80);
    asm volatile("vdpbf16ps %1, %1, %0" : "+v"(sum) : "v"(ones));
  }
};

}  // namespace

ProductUnit product_avx512_bf16() { return unit<Avx512Bf16>(); }

}  // namespace moelight
