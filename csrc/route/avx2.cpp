#include "moelight/simd_avx2.h"

#include "scatter.inl"

const moelight::ScatterKernels& moelight::scatter_avx2() { return kernels<Avx2>(); }
