#include "moelight/simd_neon.h"

#include "scatter.inl"

const moelight::ScatterKernels& moelight::scatter_neon() { return kernels<Neon>(); }
