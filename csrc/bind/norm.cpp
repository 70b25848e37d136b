// Norm and rotation: arrays are checked here and leave as plain structs. Does not depend on any algorithm.

#include "norm/norm.h"

#include <nanobind/stl/optional.h>

#include <optional>

#include "checks.h"

namespace moelight::bind {
namespace {

using namespace nb::literals;

// Of the dtype of x, [T, G, H] like it.
template <class Array>
void check_like(const char* name, const Array& array, const Out& x, DType dtype) {
  check_layout(name, array, 3);
  if (float_type(name, array) != dtype) refuse(name, "must have the dtype of x");
  for (size_t dim = 0; dim < 3; ++dim)
    check_dim(name, array, dim, static_cast<int64_t>(x.shape(dim)), dim ? "size of a row" : "tokens");
}

void rms_norm(const Out& x, const In& weight, double eps, const std::optional<In>& add, const std::optional<In>& gate,
              const Out& out, int64_t threads) {
  check_layout("x", x, 3);
  const DType dtype = float_type("x", x);
  check_layout("weight", weight, 1);
  if (float_type("weight", weight) != dtype) refuse("weight", "must have the dtype of x");
  check_dim("weight", weight, 0, static_cast<int64_t>(x.shape(2)), "size of a row");
  if (weight.shape(0) > 1 && weight.stride(0) != 1) refuse("weight", "must be contiguous");
  if (add) check_like("add", *add, x, dtype);
  if (gate) check_like("gate", *gate, x, dtype);
  check_like("out", out, x, dtype);
  const NormArgs args = {.dtype = dtype,
                         .tokens = static_cast<int64_t>(x.shape(0)),
                         .groups = static_cast<int64_t>(x.shape(1)),
                         .hidden = static_cast<int64_t>(x.shape(2)),
                         .x = x.data(),
                         .x_stride = x.stride(0),
                         .add = add ? add->data() : nullptr,
                         .add_stride = add ? add->stride(0) : 0,
                         .weight = weight.data(),
                         .gate = gate ? gate->data() : nullptr,
                         .gate_stride = gate ? gate->stride(0) : 0,
                         .eps = static_cast<float>(eps),
                         .out = out.data(),
                         .out_stride = out.stride(0),
                         .threads = checked_threads(threads)};
  nb::gil_scoped_release release;
  moelight::rms_norm(args);
}

void check_angles(const char* name, const In& angles, DType dtype, int64_t tokens, int64_t head_dim) {
  check_layout(name, angles, 2);
  if (float_type(name, angles) != dtype) refuse(name, "must have the dtype of x");
  check_dim(name, angles, 0, tokens, "tokens");
  if (static_cast<int64_t>(angles.shape(1)) < head_dim / 2)
    refuse(name, "must have half a head's columns, has shape " + shape_of(angles));
}

void rotate(const Out& x, const In& cos, const In& sin, const Out& out, int64_t threads) {
  check_layout("x", x, 3);
  const DType dtype = float_type("x", x);
  const auto tokens = static_cast<int64_t>(x.shape(0)), head_dim = static_cast<int64_t>(x.shape(2));
  if (head_dim % 2) refuse("x", "head size must be even, shape is " + shape_of(x));
  check_angles("cos", cos, dtype, tokens, head_dim);
  check_angles("sin", sin, dtype, tokens, head_dim);
  check_like("out", out, x, dtype);
  const RotateArgs args = {.dtype = dtype,
                           .tokens = tokens,
                           .heads = static_cast<int64_t>(x.shape(1)),
                           .head_dim = head_dim,
                           .x = x.data(),
                           .x_stride = x.stride(0),
                           .cos = cos.data(),
                           .sin = sin.data(),
                           .cos_stride = cos.stride(0),
                           .sin_stride = sin.stride(0),
                           .out = out.data(),
                           .out_stride = out.stride(0),
                           .threads = checked_threads(threads)};
  nb::gil_scoped_release release;
  moelight::rotate(args);
}

}  // namespace

void add_norm(nb::module_& module) {
  module.def("rms_norm", rms_norm, "x"_a, "weight"_a, "eps"_a, "add"_a.none(), "gate"_a.none(), "out"_a, "threads"_a);
  module.def("rotate", rotate, "x"_a, "cos"_a, "sin"_a, "out"_a, "threads"_a);
}

}  // namespace moelight::bind
