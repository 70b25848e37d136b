// Rows shared out over threads. Does not depend on any instruction set.

#include "norm.h"

#include "moelight/cpu.h"
#include "moelight/over_rows.h"

namespace moelight {
namespace {

const NormKernels& active_kernels() { return MOELIGHT_ACTIVE(norm)(); }

}  // namespace

void rms_norm(const NormArgs& args) {
  if (args.hidden == 0) return;
  const auto norm = active_kernels().norm[static_cast<int>(args.dtype)];
  over_rows(args.threads, args.tokens, 2 * args.groups * args.hidden * dtype_bytes(args.dtype),
            [&](int64_t begin, int64_t end) { norm(args, begin, end); });
}

void rotate(const RotateArgs& args) {
  const auto turn = active_kernels().rotate[static_cast<int>(args.dtype)];
  over_rows(args.threads, args.tokens, 2 * args.heads * args.head_dim * dtype_bytes(args.dtype),
            [&](int64_t begin, int64_t end) { turn(args, begin, end); });
}

}  // namespace moelight
