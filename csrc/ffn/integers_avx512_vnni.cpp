#include "integers_avx512_vnni.h"

moelight::Kernel moelight::integers_avx512_vnni(DType x) { return integer_kernel_for<VnniIntegers>(x); }
