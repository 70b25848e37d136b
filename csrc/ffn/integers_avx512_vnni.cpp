#include "integer_rows_avx512.h"

namespace moelight {
namespace {

struct WithStoredRows : VnniIntegers {
  static constexpr StoredProducts kStored = multiply_stored_rows;
  static constexpr int64_t kStoredBytes = kLinesBytes + sizeof(RowSums);
};

}  // namespace

Kernel integers_avx512_vnni(DType x) { return integer_kernel_for<WithStoredRows>(x); }

}  // namespace moelight
