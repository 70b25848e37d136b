#include "moelight/simd_avx512.h"

#include "kernel.inl"

const moelight::DeltaKernels& moelight::delta_avx512() { return kernels<Avx512>(); }
