// Whole matrices as numbers by AVX2: as floats many columns at once. Internal linkage.
#pragma once

#include "floats_avx2.h"

namespace moelight {
namespace {

inline void unpack_any_floats(const Quantized& q, int64_t row, int64_t rows, int64_t first, int64_t size, int64_t lead,
                              void* to, int64_t to_bytes) {
  unpack_floats_of<float>(q)(q, row, rows, first, size, lead, to, to_bytes);
}

inline Unpack unpack_by_avx2(DType to) { return to == DType::kFloat32 ? unpack_any_floats : unpack_to(to); }

}  // namespace
}  // namespace moelight
