#include "moelight/simd_avx512.h"

#include "kernel.inl"

moelight::Kernel moelight::ffn_avx512(DType x, WeightType weight) { return float_kernel<Avx512>(x, weight); }
