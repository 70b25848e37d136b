#include "moelight/simd_avx512.h"

#include "kernel.inl"

const moelight::Lanes& moelight::ffn_avx512() { return float_lanes<Avx512>(); }
