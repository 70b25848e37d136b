// The roofs that kernels are held against.

#include "peaks/peaks.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <iterator>

#include "checks.h"

namespace moelight::bind {
namespace {

using namespace nb::literals;

uint64_t read_peak(const In& bytes, int64_t threads) {
  check_layout("bytes", bytes, 1);
  if (bytes.dtype() != nb::dtype<uint8_t>()) refuse("bytes", "must be uint8");
  if (bytes.shape(0) > 1 && bytes.stride(0) != 1) refuse("bytes", "must be contiguous");
  const int workers = checked_threads(threads);
  nb::gil_scoped_release release;
  return moelight::read_peak(static_cast<const char*>(bytes.data()), static_cast<int64_t>(bytes.shape(0)), workers);
}

double product_peak(const std::string& dtype, int64_t rounds, int64_t threads) {
  constexpr const char* kNames[] = {"float32", "bfloat16", "int8"};
  const auto named = std::find(std::begin(kNames), std::end(kNames), dtype);
  if (named == std::end(kNames)) refuse("dtype", "must be float32, bfloat16 or int8, is '" + dtype + "'");
  if (rounds < 1) refuse("rounds", "must be at least 1, is " + std::to_string(rounds));
  const int workers = checked_threads(threads);
  nb::gil_scoped_release release;
  return moelight::product_peak(static_cast<ProductType>(named - std::begin(kNames)), rounds, workers);
}

}  // namespace

void add_peaks(nb::module_& module) {
  module.def("read_peak", read_peak, "bytes"_a, "threads"_a);
  module.def("product_peak", product_peak, "dtype"_a, "rounds"_a, "threads"_a);
}

}  // namespace moelight::bind
