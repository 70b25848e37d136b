#include "integers_avx512.h"

moelight::Kernel moelight::integers_avx512(DType x) { return integer_kernel_for<Avx512Integers>(x); }
