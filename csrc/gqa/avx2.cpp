#include "lanes_avx2.h"

#include "kernel.inl"

const moelight::GqaKernels& moelight::gqa_avx2() { return float_kernels<LanesAvx2>(); }
