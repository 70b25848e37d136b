// Quantised matrices as numbers, in plain code for any processor. Internal linkage: every instruction set compiles its
// own copy.
#pragma once

#include <type_traits>

#include "formats.h"

namespace moelight {
namespace {

// An Unpack of any format, as numbers X, rounded to R before.
template <class X, class R = X>
void unpack_plainly(const Quantized& q, int64_t row, int64_t rows, int64_t first, int64_t size, int64_t, void* to,
                    int64_t to_bytes) {
  const LineDecoder decode = line_decoder(q);
  for (int64_t r = 0; r < rows; ++r) {
    alignas(64) float line[kMostColumns];
    decode(q, row + r, first, size, line);
    auto* const out = reinterpret_cast<X*>(static_cast<char*>(to) + r * to_bytes);
    for (int64_t i = 0; i < size; ++i) {
      R rounded;
      from_float(line[i], rounded);
      if constexpr (std::is_same_v<X, R>)
        out[i] = rounded;
      else
        out[i] = to_float(rounded);
    }
    for (int64_t i = size; i % kUnpackStep != 0; ++i) out[i] = {};
  }
}

inline Unpack unpack_to(DType type) {
  switch (type) {
    case DType::kBFloat16:
      return unpack_plainly<Bf16>;
    case DType::kFloat16:
      return unpack_plainly<Fp16>;
    case DType::kFloat32:
      break;
  }
  return unpack_plainly<float>;
}

}  // namespace
}  // namespace moelight
