#include "moelight/simd_scalar.h"

#include "kernel.inl"

const moelight::DeltaKernels& moelight::delta_scalar() { return kernels<Scalar>(); }
