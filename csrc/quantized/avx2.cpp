#include "dequantize_avx2.h"

moelight::Unpack moelight::unpack_avx2(DType to) { return unpack_by_avx2(to); }
