#include "moelight/simd_scalar.h"

#include "kernel.inl"

const moelight::Lanes& moelight::ffn_scalar() { return float_lanes<Scalar>(); }
