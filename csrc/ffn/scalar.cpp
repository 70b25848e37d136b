#include "moelight/simd_scalar.h"

#include "kernel.inl"

moelight::Kernel moelight::ffn_scalar(DType x, WeightType weight) { return float_kernel<Scalar>(x, weight); }
