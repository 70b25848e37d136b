#include "moelight/simd_neon.h"

#include "kernel.inl"

const moelight::DeltaKernels& moelight::delta_neon() { return kernels<Neon>(); }
