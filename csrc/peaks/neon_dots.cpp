#include <arm_neon.h>

#include "unit.inl"

namespace moelight {
namespace {

struct NeonDotsUnit {
  using V = int32x4_t;
  static constexpr int kChains = 16;
  static constexpr double kFlop = 32;
  static V zero() { return vdupq_n_s32(0); }
  static V add(V x, V y) { return vaddq_s32(x, y); }
  static void multiply_add(V& sum) {
    const int8x16_t ones = vdupq_n_s8(1);
    asm volatile("sdot %0.4s, %1.16b, %1.16b" : "+w"(sum) : "w"(ones));
  }
};

}  // namespace

ProductUnit product_neon_dots() { return unit<NeonDotsUnit>(); }

}  // namespace moelight
