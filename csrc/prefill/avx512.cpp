#include "lanes_avx512.h"

#include "kernel.inl"

const moelight::PrefillKernels& moelight::prefill_avx512() { return kernels<PrefillAvx512>(); }
