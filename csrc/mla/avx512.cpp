#include "gqa/lanes_avx512.h"

#include "kernel.inl"

const moelight::MlaKernels& moelight::mla_avx512() { return kernels<LanesAvx512>(); }
