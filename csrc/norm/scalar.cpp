#include "moelight/simd_scalar.h"

#include "kernel.inl"

const moelight::NormKernels& moelight::norm_scalar() { return kernels<Scalar>(); }
