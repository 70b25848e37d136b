// Writes new keys and values into their slots of the paged cache. Bytes only: knows no element type.

#include <algorithm>
#include <cstring>

#include "gqa.h"
#include "moelight/threads.h"

namespace moelight {
namespace {

// Below this a second thread costs more than it brings.
constexpr int64_t kBytesPerThread = int64_t{1} << 18;

void append_head(const AppendArgs& args, int64_t head, void* cache, int64_t stride, const void* fresh,
                 int64_t fresh_stride) {
  const int64_t row_bytes = args.head_dim * args.element_bytes;
  for (int64_t t = 0; t < args.tokens; ++t) {
    const int64_t block = args.slots[t] / args.block_size, offset = args.slots[t] % args.block_size;
    const int64_t row = (head * args.block_size + offset) * args.head_dim;
    std::memcpy(static_cast<char*>(cache) + (block * stride + row) * args.element_bytes,
                static_cast<const char*>(fresh) + (t * fresh_stride + head * args.head_dim) * args.element_bytes,
                static_cast<size_t>(row_bytes));
  }
}

}  // namespace

// A head belongs to one thread and its tokens go in order, so a slot named twice keeps the later token.
void kv_append(const AppendArgs& args) {
  const int64_t bytes = 2 * args.tokens * args.kv_heads * args.head_dim * args.element_bytes;
  const auto threads = static_cast<int>(std::clamp<int64_t>(bytes / kBytesPerThread, 1, args.threads));
  parallel_for(threads, 2 * args.kv_heads, [&](int64_t i, int) {
    const int64_t head = i / 2;
    if (i % 2 == 0) {
      append_head(args, head, args.k_cache, args.k_stride, args.k_new, args.k_new_stride);
    } else {
      append_head(args, head, args.v_cache, args.v_stride, args.v_new, args.v_new_stride);
    }
  });
}

}  // namespace moelight
