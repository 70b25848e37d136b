#include "lanes_avx2.h"

#include "kernel.inl"

const moelight::PrefillKernels& moelight::prefill_avx2() { return kernels<PrefillAvx2>(); }
