#include "moelight/simd_avx2.h"

#include "kernel.inl"

const moelight::Lanes& moelight::ffn_avx2() { return float_lanes<Avx2>(); }
