#include "integers_avx2.h"

namespace moelight {
namespace {

struct AvxVnniIntegers : Avx2Integers {
  static V dot(V sum, V codes, V four) { return _mm256_dpbusd_avx_epi32(sum, codes, four); }
};

}  // namespace

Kernel integers_avx_vnni(DType x) { return integer_kernel_for<AvxVnniIntegers>(x); }

}  // namespace moelight
