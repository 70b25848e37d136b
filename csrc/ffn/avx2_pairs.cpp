#include "pairs_avx2.h"
#include "quantized/wide_avx2.h"

moelight::Kernel moelight::ffn_avx2_pairs(WeightType weight) {
  switch (weight) {
    case WeightType::kInt8:
      return pairs_kernel<StoredBytes>();
    case WeightType::kInt4:
      return pairs_kernel<StoredNibbles>();
    case WeightType::kQuantized: {
      Kernel kernel = pairs_kernel<StoredCodes>();
      kernel.unpacking = [](const Quantized& like) { return Unpacking{unpack_wide_of(like)}; };
      return kernel;
    }
    default:
      return pairs_kernel<StoredPairs>();
  }
}
