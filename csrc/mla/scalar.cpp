#include "gqa/lanes_scalar.h"

#include "kernel.inl"

const moelight::MlaKernels& moelight::mla_scalar() { return kernels<LanesScalar>(); }
