#include "gqa/lanes_avx2.h"

#include "kernel.inl"

const moelight::MlaKernels& moelight::mla_avx2() { return kernels<LanesAvx2>(); }
