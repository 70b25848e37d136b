#include "moelight/simd_avx2.h"

#include "kernel.inl"

const moelight::NormKernels& moelight::norm_avx2() { return kernels<Avx2>(); }
