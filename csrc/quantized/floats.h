// Unpacks quantised matrices to floats in the order of columns, in plain code. Internal linkage.
#pragma once

#include "unpack.h"

namespace moelight {
namespace {

// The Unpack of matrices like this one to floats, rounded to R before.
template <class R>
inline Unpack unpack_floats_of(const Quantized&) {
  return unpack_plainly<float, R>;
}

}  // namespace
}  // namespace moelight
