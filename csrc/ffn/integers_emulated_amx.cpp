#include "integers_avx512_vnni.h"
#include "tiles/emulated_integers.h"

moelight::Kernel moelight::integers_emulated(DType x) {
  return tiled_kernel_for<VnniIntegers, EmulatedIntegerTiles, integers_avx512_vnni>(x);
}
