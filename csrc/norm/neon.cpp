#include "moelight/simd_neon.h"

#include "kernel.inl"

const moelight::NormKernels& moelight::norm_neon() { return kernels<Neon>(); }
