#include "gqa/lanes_neon.h"

#include "kernel.inl"

const moelight::MlaKernels& moelight::mla_neon() { return kernels<LanesNeon>(); }
