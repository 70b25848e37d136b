#include "lanes_scalar.h"

#include "kernel.inl"

const moelight::GqaKernels& moelight::gqa_scalar() { return float_kernels<LanesScalar>(); }
