#include "pairs_avx2.h"

moelight::Kernel moelight::ffn_avx2_pairs(WeightType weight) {
  switch (weight) {
    case WeightType::kInt8:
      return pairs_kernel<StoredBytes>();
    case WeightType::kInt4:
      return pairs_kernel<StoredNibbles>();
    default:
      return pairs_kernel<StoredPairs>();
  }
}
