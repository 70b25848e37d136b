#include <arm_neon.h>

#include "unit.inl"

namespace moelight {
namespace {

struct NeonUnit {
  using V = float32x4_t;
  static constexpr int kChains = 16;
  static constexpr double kFlop = 8;
  static V zero() { return vdupq_n_f32(0.0f); }
  static V add(V x, V y) { return vaddq_f32(x, y); }
  static void multiply_add(V& sum) {
    const V one = vdupq_n_f32(1.0f);
    asm volatile("fmla %0.4s, %1.4s, %1.4s" : "+w"(sum) : "w"(one));
  }
};

}  // namespace

ProductUnit product_neon() { return unit<NeonUnit>(); }

}  // namespace moelight
