#include "integers_avx512_vnni.h"
#include "tiles/amx_integers.h"

moelight::Kernel moelight::integers_amx(DType x) { return integer_kernel_for<VnniIntegers, AmxIntegerTiles>(x); }
