#include "lanes_neon.h"

#include "kernel.inl"

const moelight::GqaKernels& moelight::gqa_neon() { return float_kernels<LanesNeon>(); }
