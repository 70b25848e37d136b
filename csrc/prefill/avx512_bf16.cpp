#include "dots.h"
#include "kernel.inl"

const moelight::PrefillKernels& moelight::prefill_avx512_bf16() { return kernels<PrefillAvx512, Dots>(); }
