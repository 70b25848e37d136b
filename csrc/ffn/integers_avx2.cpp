#include "integer_panels_avx2.h"

moelight::Kernel moelight::integers_avx2(DType x) { return integer_kernel_for<Avx2Panels>(x); }
