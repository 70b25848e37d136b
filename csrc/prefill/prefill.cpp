// Cuts prompts into tiles of queries and hands them to the threads. Does not depend on any instruction set.

#include "prefill.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "moelight/cpu.h"
#include "moelight/threads.h"

namespace moelight {
namespace {

#if defined(__x86_64__)
const PrefillKernels& active_kernels() {
  switch (bf16_products()) {
    case Bf16Products::kTiles:
      return prefill_amx();
    case Bf16Products::kPairs:
    case Bf16Products::kHalves:
      return prefill_avx512_bf16();
    case Bf16Products::kEmulated:
      return prefill_emulated();
    case Bf16Products::kWide:
      break;
  }
  return MOELIGHT_ACTIVE(prefill)();
}
#else
const PrefillKernels& active_kernels() { return MOELIGHT_ACTIVE(prefill)(); }
#endif

struct FreeFloats {
  void operator()(float* p) const { std::free(p); }
};

// Grows and never shrinks, one for each calling thread: a fresh mapping at every call would fault in page by page.
float* workspace(int64_t floats) {
  thread_local std::unique_ptr<float, FreeFloats> memory;
  thread_local int64_t capacity = 0;
  if (floats > capacity) {
    memory.reset();
    capacity = 0;
    memory.reset(static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>((floats + 15) / 16 * 64))));
    if (!memory) throw std::bad_alloc();
    capacity = floats;
  }
  return memory.get();
}

// The last tiles of a prompt see the most keys: they come first, so that none is left for the end.
std::vector<QueryTile> cut(const PrefillArgs& args, int64_t tokens) {
  std::vector<QueryTile> tiles;
  for (int64_t s = 0; s < args.sequences; ++s) {
    const int64_t length = args.bounds[s + 1] - args.bounds[s];
    for (int64_t h = 0; h < args.kv_heads; ++h)
      for (int64_t begin = (length - 1) / tokens * tokens; length > 0 && begin >= 0; begin -= tokens)
        tiles.push_back({s, h, begin, std::min(length, begin + tokens)});
  }
  return tiles;
}

}  // namespace

void prefill(const PrefillArgs& args) {
  const PrefillKernels& kernels = active_kernels();
  const int64_t group = args.q_heads / args.kv_heads;
  const int64_t tokens = std::max<int64_t>(1, kTileRows / group);
  const std::vector<QueryTile> tiles = cut(args, tokens);
  if (tiles.empty()) return;
  const auto attend = kernels.attend[static_cast<int>(args.dtype)];
  const auto threads = static_cast<int>(std::min<int64_t>(args.threads, static_cast<int64_t>(tiles.size())));
  const int64_t floats = (kernels.scratch_floats(args.head_dim, tokens * group) + 15) / 16 * 16;
  float* scratch = workspace(threads * floats);
  parallel_for(threads, static_cast<int64_t>(tiles.size()),
               [&](int64_t i, int worker) { attend(args, tiles[static_cast<size_t>(i)], scratch + worker * floats); });
}

}  // namespace moelight
