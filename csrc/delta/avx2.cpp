#include "moelight/simd_avx2.h"

#include "kernel.inl"

const moelight::DeltaKernels& moelight::delta_avx2() { return kernels<Avx2>(); }
