#include "lanes_scalar.h"

#include "kernel.inl"

const moelight::PrefillKernels& moelight::prefill_scalar() { return kernels<PrefillScalar>(); }
