#include "lanes_neon.h"

#include "kernel.inl"

const moelight::PrefillKernels& moelight::prefill_neon() { return kernels<PrefillNeon>(); }
