#include "unpack.h"

moelight::Unpack moelight::unpack_avx2(DType to) { return unpack_to(to); }
