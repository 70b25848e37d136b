#include "integers_neon.h"

namespace moelight {
namespace {

struct NeonDots : NeonIntegers {
  static V dot(V sum, V codes, V four) {
    return {dot(sum.low, codes.low, four.low), dot(sum.high, codes.high, four.high)};
  }

 private:
  // sdot takes signed codes: they are 128 less, which is made good by twice 64.
  static int32x4_t dot(int32x4_t sum, int32x4_t codes, int32x4_t four) {
    const int8x16_t x = vreinterpretq_s8_s32(four), signs = vdupq_n_s8(-128), half = vdupq_n_s8(64);
    const int32x4_t more = vdotq_s32(vdotq_s32(vdupq_n_s32(0), half, x), half, x);
    return vdotq_s32(vaddq_s32(sum, more), veorq_s8(vreinterpretq_s8_s32(codes), signs), x);
  }
};

}  // namespace

Kernel integers_neon_dots(DType x) { return integer_kernel_for<NeonDots>(x); }

}  // namespace moelight
