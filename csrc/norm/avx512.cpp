#include "moelight/simd_avx512.h"

#include "kernel.inl"

const moelight::NormKernels& moelight::norm_avx512() { return kernels<Avx512>(); }
