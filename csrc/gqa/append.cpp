// Writes new keys and values into their slots of the paged cache, as they are or as int8 with a scale for each row.

#include <algorithm>
#include <cstring>

#include "gqa.h"
#include "moelight/threads.h"

namespace moelight {
namespace {

// Below this a second thread costs more than it brings.
constexpr int64_t kBytesPerThread = int64_t{1} << 18;

// Keys, or values.
struct Side {
  void* cache;
  int64_t stride;
  float* scale;
  int64_t scale_stride;
  const void* fresh;
  int64_t fresh_stride;
};

void append_head(const AppendArgs& args, int64_t head, const Side& side) {
  const int64_t bytes = dtype_bytes(args.dtype);
  const auto quantise = gqa_active().quantise[static_cast<int>(args.dtype)];
  for (int64_t t = 0; t < args.tokens; ++t) {
    if (args.slots[t] < 0) continue;
    const int64_t block = args.slots[t] / args.block_size, offset = args.slots[t] % args.block_size;
    const int64_t row = head * args.block_size + offset, to = block * side.stride + row * args.head_dim;
    const void* from = static_cast<const char*>(side.fresh) + (t * side.fresh_stride + head * args.head_dim) * bytes;
    if (args.int8) {
      quantise(from, args.head_dim, static_cast<int8_t*>(side.cache) + to,
               side.scale + block * side.scale_stride + row);
    } else {
      std::memcpy(static_cast<char*>(side.cache) + to * bytes, from, static_cast<size_t>(args.head_dim * bytes));
    }
  }
}

}  // namespace

// A head belongs to one thread and its tokens go in order, so a slot named twice keeps the later token.
void kv_append(const AppendArgs& args) {
  const Side keys = {args.k_cache, args.k_stride, args.k_scale, args.k_scale_stride, args.k_new, args.k_new_stride};
  const Side values = {args.v_cache, args.v_stride, args.v_scale, args.v_scale_stride, args.v_new, args.v_new_stride};
  const int64_t bytes = 2 * args.tokens * args.kv_heads * args.head_dim * dtype_bytes(args.dtype);
  const auto threads = static_cast<int>(std::clamp<int64_t>(bytes / kBytesPerThread, 1, args.threads));
  parallel_for(threads, 2 * args.kv_heads,
               [&](int64_t i, int) { append_head(args, i / 2, i % 2 == 0 ? keys : values); });
}

}  // namespace moelight
