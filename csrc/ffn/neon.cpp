#include "moelight/simd_neon.h"

#include "kernel.inl"
#include "quantized/wide_neon.h"

moelight::Kernel moelight::ffn_neon(DType x, WeightType weight) {
  Kernel kernel = float_kernel<Neon>(x, weight);
  if (x == DType::kFloat32)
    kernel.unpacking = [](const Quantized& like) { return Unpacking{unpack_neon_of<float>(like)}; };
  return kernel;
}
