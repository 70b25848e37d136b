// Rows sorted by expert, gathered, and summed back. Does not depend on any instruction set.

#include <algorithm>
#include <cstring>

#include "moelight/cpu.h"
#include "moelight/over_rows.h"
#include "route.h"

namespace moelight {
namespace {

const ScatterKernels& active_kernels() { return MOELIGHT_ACTIVE(scatter)(); }

}  // namespace

void sort_by_expert(const SortArgs& args) {
  std::fill(args.offsets, args.offsets + args.experts + 1, 0);
  for (int64_t t = 0; t < args.tokens; ++t)
    for (int64_t r = 0; r < args.top_k; ++r) ++args.offsets[args.ids[t * args.stride + r] + 1];
  for (int64_t e = 0; e < args.experts; ++e) args.offsets[e + 1] += args.offsets[e];
  // While rows are dealt out, offsets[e] is where expert e's next row goes; afterwards it is where e + 1 begins.
  for (int64_t t = 0; t < args.tokens; ++t) {
    for (int64_t r = 0; r < args.top_k; ++r) {
      const int32_t at = args.offsets[args.ids[t * args.stride + r]]++;
      args.order[at] = static_cast<int32_t>(t * args.top_k + r);
      args.token[at] = static_cast<int32_t>(t);
      args.position[t * args.top_k + r] = at;
    }
  }
  std::copy_backward(args.offsets, args.offsets + args.experts, args.offsets + args.experts + 1);
  args.offsets[0] = 0;
}

void gather_rows(const GatherArgs& args) {
  if (args.row_bytes == 0) return;
  over_rows(args.threads, args.rows, args.row_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      std::memcpy(args.out + r * args.out_stride, args.x + args.token[r] * args.x_stride,
                  static_cast<size_t>(args.row_bytes));
  });
}

void scatter_sum(const ScatterArgs& args) {
  if (args.hidden == 0) return;
  const auto sum = active_kernels().sum[static_cast<int>(args.dtype)];
  over_rows(args.threads, args.tokens, args.top_k * args.hidden * dtype_bytes(args.dtype),
            [&](int64_t begin, int64_t end) { sum(args, begin, end); });
}

}  // namespace moelight
