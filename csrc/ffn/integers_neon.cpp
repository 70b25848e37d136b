#include "integers_neon.h"

moelight::Kernel moelight::integers_neon(DType x) { return integer_kernel_for<NeonIntegers>(x); }
