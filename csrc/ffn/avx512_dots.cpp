#include "dots.inl"

moelight::Kernel moelight::ffn_avx512_dots(WeightType weight) {
  switch (weight) {
    case WeightType::kInt8:
      return dots_kernel<StoredInt8>();
    case WeightType::kInt4:
      return dots_kernel<StoredInt4>();
    default:
      return dots_kernel<StoredBf16>();
  }
}
