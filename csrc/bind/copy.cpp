// Copies between regions of host memory. Knows bytes only.

#include "copy/copy.h"

#include "checks.h"

namespace moelight::bind {
namespace {

using namespace nb::literals;

void copy_pages(const Out& dst, const In& src, int64_t threads) {
  check_bytes("dst", dst);
  check_bytes("src", src);
  const auto bytes = static_cast<int64_t>(dst.shape(0));
  check_dim("src", src, 0, bytes, "length");
  const auto to = reinterpret_cast<uintptr_t>(dst.data()), from = reinterpret_cast<uintptr_t>(src.data());
  if (bytes > 0 && (to < from ? from - to : to - from) < static_cast<uintptr_t>(bytes)) refuse("src", "overlaps dst");
  const int workers = checked_threads(threads);
  nb::gil_scoped_release release;
  moelight::copy_pages(static_cast<char*>(dst.data()), static_cast<const char*>(src.data()), bytes, workers);
}

}  // namespace

void add_copy(nb::module_& module) { module.def("copy_pages", copy_pages, "dst"_a, "src"_a, "threads"_a); }

}  // namespace moelight::bind
