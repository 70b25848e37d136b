#include "moelight/simd_avx512.h"

#include "scatter.inl"

const moelight::ScatterKernels& moelight::scatter_avx512() { return kernels<Avx512>(); }
