#include "unpack.h"

moelight::Unpack moelight::unpack_avx512(DType to) { return unpack_to(to); }
