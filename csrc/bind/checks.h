// What every binding checks of an array before a kernel sees it. Every refusal is a ValueError that names the argument.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <string>

#include "moelight/half.h"

namespace moelight::bind {

namespace nb = nanobind;

using In = nb::ndarray<nb::ro>;
using Out = nb::ndarray<>;

[[noreturn]] inline void refuse(const char* name, const std::string& reason) {
  throw nb::value_error((std::string(name) + ": " + reason).c_str());
}

template <class Array>
std::string shape_of(const Array& array) {
  std::string text = "[";
  for (size_t i = 0; i < array.ndim(); ++i) text += (i ? ", " : "") + std::to_string(array.shape(i));
  return text + "]";
}

// Dimensions after the first must be contiguous; a dimension of one element has no stride worth checking.
template <class Array>
void check_layout(const char* name, const Array& array, size_t ndim) {
  if (array.device_type() != nb::device::cpu::value) refuse(name, "must be in CPU memory");
  if (array.ndim() != ndim)
    refuse(name, "must have " + std::to_string(ndim) + " dimensions, has shape " + shape_of(array));
  int64_t expected = 1;
  for (size_t i = ndim; i-- > 1;) {
    if (array.shape(i) > 1 && array.stride(i) != expected)
      refuse(name, "must be contiguous beyond its first dimension");
    expected *= static_cast<int64_t>(array.shape(i));
  }
  if (array.shape(0) > 1 && array.stride(0) < expected) refuse(name, "rows overlap");
}

template <class Array>
void check_bytes(const char* name, const Array& array) {
  check_layout(name, array, 1);
  if (array.dtype() != nb::dtype<uint8_t>()) refuse(name, "must be uint8");
  if (array.shape(0) > 1 && array.stride(0) != 1) refuse(name, "must be contiguous");
}

template <class Array>
void check_dim(const char* name, const Array& array, size_t dim, int64_t expected, const char* meaning) {
  if (static_cast<int64_t>(array.shape(dim)) != expected)
    refuse(name, std::string(meaning) + " must be " + std::to_string(expected) + ", shape is " + shape_of(array));
}

template <class Array>
DType float_type(const char* name, const Array& array) {
  const nb::dlpack::dtype type = array.dtype();
  const auto code = static_cast<nb::dlpack::dtype_code>(type.code);
  if (type.lanes == 1 && code == nb::dlpack::dtype_code::Float && type.bits == 32) return DType::kFloat32;
  if (type.lanes == 1 && code == nb::dlpack::dtype_code::Float && type.bits == 16) return DType::kFloat16;
  if (type.lanes == 1 && code == nb::dlpack::dtype_code::Bfloat && type.bits == 16) return DType::kBFloat16;
  refuse(name, "must be float32, bfloat16 or float16");
}

template <class Array>
void check_float_type(const char* name, const Array& array, DType expected) {
  if (float_type(name, array) != expected) refuse(name, "must have the same dtype as the cache");
}

template <class T>
void check_int_type(const char* name, const In& array) {
  if (array.dtype() != nb::dtype<T>()) refuse(name, "must be int" + std::to_string(8 * sizeof(T)));
}

inline int checked_threads(int64_t threads) {
  if (threads < 1) refuse("threads", "must be at least 1, is " + std::to_string(threads));
  return static_cast<int>(std::min<int64_t>(threads, 1024));
}

// What each family of kernels adds to the module.
void add_gqa(nb::module_& module);
void add_delta(nb::module_& module);
void add_ffn(nb::module_& module);
void add_forms(nb::module_& module);
void add_mla(nb::module_& module);
void add_layer(nb::module_& module);
void add_norm(nb::module_& module);
void add_copy(nb::module_& module);
void add_peaks(nb::module_& module);
void add_prefill(nb::module_& module);
void add_quantized(nb::module_& module);
void add_read(nb::module_& module);
void add_repack(nb::module_& module);
void add_route(nb::module_& module);
void add_threads(nb::module_& module);

}  // namespace moelight::bind
