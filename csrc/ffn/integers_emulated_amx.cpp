#include "integers_avx512_vnni.h"
#include "tiles/emulated_integers.h"

moelight::Kernel moelight::integers_emulated(DType x) {
  return integer_kernel_for<VnniIntegers, EmulatedIntegerTiles>(x);
}
