#include "moelight/simd_scalar.h"

#include "scatter.inl"

const moelight::ScatterKernels& moelight::scatter_scalar() { return kernels<Scalar>(); }
