#include "unpack.h"

moelight::Unpack moelight::unpack_scalar(DType to) { return unpack_to(to); }
