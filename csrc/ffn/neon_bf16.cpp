#include "pairs_neon.h"

namespace moelight {
namespace {

// By bfmlalb and bfmlalt, which round as a fused multiply-add of the widened numbers does. (bfdot and bfmmla round to
// odd and take what is subnormal as zero: their bits would be others.)
struct FusedPairs {
  static constexpr bool kWidens = false;
  static Neon::V madd(Neon::V sum, StoredPairs weight, StoredPairs x) {
    return {madd(sum.low, weight.low, x.low), madd(sum.high, weight.high, x.high)};
  }

 private:
  static float32x4_t madd(float32x4_t sum, uint32x4_t weight, uint32x4_t x) {
    const bfloat16x8_t left = vreinterpretq_bf16_u32(weight), right = vreinterpretq_bf16_u32(x);
    return vbfmlaltq_f32(vbfmlalbq_f32(sum, left, right), left, right);
  }
};

}  // namespace

Kernel ffn_neon_bf16() { return pairs_kernel<FusedPairs>(); }

}  // namespace moelight
