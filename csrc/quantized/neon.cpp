#include "unpack.h"

moelight::Unpack moelight::unpack_neon(DType to) { return unpack_to(to); }
