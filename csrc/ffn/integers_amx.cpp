#include "integers_avx512_vnni.h"
#include "tiles/amx_integers.h"

moelight::Kernel moelight::integers_amx(DType x) {
  return tiled_kernel_for<VnniIntegers, AmxIntegerTiles, integers_avx512_vnni>(x);
}
