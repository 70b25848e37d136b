// Writes new rows into their slots of the paged latent cache. Bytes only: knows no element type.

#include <algorithm>
#include <cstring>

#include "mla.h"
#include "moelight/threads.h"

namespace moelight {
namespace {

// Below this a second thread costs more than it brings.
constexpr int64_t kBytesPerThread = int64_t{1} << 18;

}  // namespace

// A share of every row belongs to one thread and the tokens go in order, so a slot named twice keeps the later token.
void mla_append(const MlaAppendArgs& args) {
  const int64_t bytes = args.tokens * args.row_bytes;
  const auto shares = std::clamp<int64_t>(bytes / kBytesPerThread, 1, args.threads);
  parallel_for(static_cast<int>(shares), shares, [&](int64_t share, int) {
    const int64_t first = args.row_bytes * share / shares, last = args.row_bytes * (share + 1) / shares;
    for (int64_t t = 0; t < args.tokens; ++t) {
      const int64_t block = args.slots[t] / args.block_size, offset = args.slots[t] % args.block_size;
      std::memcpy(static_cast<char*>(args.cache) + block * args.cache_stride_bytes + offset * args.row_bytes + first,
                  static_cast<const char*>(args.fresh) + t * args.fresh_stride_bytes + first,
                  static_cast<size_t>(last - first));
    }
  });
}

}  // namespace moelight
