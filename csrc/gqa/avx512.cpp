#include "lanes_avx512.h"

#include "kernel.inl"

const moelight::GqaKernels& moelight::gqa_avx512() { return float_kernels<LanesAvx512>(); }
