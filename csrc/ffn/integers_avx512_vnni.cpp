#include "integer_rows_avx512.h"

namespace moelight {
namespace {

struct VnniIntegers : Avx512Integers {
  // In assembly, because gcc 12 keeps sums of the intrinsic in memory.
  static V dot(V sum, V codes, V four) { return dot_bytes(sum, codes, four); }
  static V words(V sum, V x, V y) { return dot_words(sum, x, y); }
  static constexpr StoredProducts kStored = multiply_stored_rows;
  static constexpr int64_t kStoredBytes = kLinesRoom + sizeof(RowSums);
};

}  // namespace

Kernel integers_avx512_vnni(DType x) { return integer_kernel_for<VnniIntegers>(x); }

}  // namespace moelight
