#include "integers_neon.h"

namespace moelight {
namespace {

struct NeonMixedDots : NeonIntegers {
  static V dot(V sum, V codes, V four) {
    return {dot(sum.low, codes.low, four.low), dot(sum.high, codes.high, four.high)};
  }

 private:
  static int32x4_t dot(int32x4_t sum, int32x4_t codes, int32x4_t four) {
    return vusdotq_s32(sum, vreinterpretq_u8_s32(codes), vreinterpretq_s8_s32(four));
  }
};

}  // namespace

Kernel integers_neon_i8mm(DType x) { return integer_kernel_for<NeonMixedDots>(x); }

}  // namespace moelight
