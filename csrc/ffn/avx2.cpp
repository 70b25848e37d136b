#include "moelight/simd_avx2.h"

#include "kernel.inl"

moelight::Kernel moelight::ffn_avx2(DType x, WeightType weight) { return float_kernel<Avx2>(x, weight); }
