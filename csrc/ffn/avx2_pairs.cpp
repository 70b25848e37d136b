#include "pairs_avx2.h"
#include "quantized/wide_avx2.h"

moelight::Kernel moelight::ffn_avx2_pairs(WeightType weight) {
  if (weight != WeightType::kQuantized) return pairs_kernel<false>();
  Kernel kernel = pairs_kernel<true>();
  kernel.unpacking = unpacking_wide_of;
  return kernel;
}
