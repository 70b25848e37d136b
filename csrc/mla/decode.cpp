// Cuts latent attention into pieces, hands them to the threads and joins what they return. Does not depend on any
// instruction set.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "mla.h"
#include "moelight/cpu.h"
#include "moelight/threads.h"
#include "moelight/workspace.h"

namespace moelight {
namespace {

const MlaKernels& active_kernels() {
#if defined(__x86_64__)
  if (bf16_products() == Bf16Products::kTiles) return mla_amx();
  if (bf16_products() == Bf16Products::kEmulated) return mla_emulated();
#endif
  return MOELIGHT_ACTIVE(mla)();
}

// A partial is as large as hundreds of cached rows, so there are never more of them than this at a time.
constexpr int64_t kPartialFloats = int64_t{1} << 24;

// Fewer heads than this do not repay the second widening of their rows. A multiple of every instruction set's lanes.
constexpr int64_t kLeastHeads = 16;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Some heads of one sequence; their partials lie side by side in the order of the context.
struct MlaGroup {
  MlaPiece piece;
  int64_t first_part, parts;
};

struct MlaTask {
  MlaPiece piece;
  int64_t group, part;
};

// Consecutive sequences whose partials exist at the same time.
class Wave {
 public:
  Wave(const MlaArgs& args, Workspace& workspace, int64_t first, int64_t last) : args_(args) {
    cut(first, last);
    unfinished_ = std::make_unique<std::atomic<int64_t>[]>(groups_.size());
    for (size_t g = 0; g < groups_.size(); ++g) unfinished_[g].store(groups_[g].parts, std::memory_order_relaxed);
    lay_out(workspace);
  }

  // The first sequence after those that share a wave with `first`.
  static int64_t end_of(const MlaArgs& args, int64_t first) {
    const int64_t max_parts = std::max<int64_t>(1, kPartialFloats / (args.heads * args.latent));
    int64_t parts = 0, last = first;
    while (last < args.batch) {
      parts += ceil_div(args.seq_lens[last], kMlaChunk);
      if (parts > max_parts && last > first) break;
      ++last;
    }
    return last;
  }

  void run() {
    const int dtype = static_cast<int>(args_.dtype);
    parallel_for(args_.threads, static_cast<int64_t>(tasks_.size()), [&](int64_t i, int worker) {
      const MlaTask& task = tasks_[i];
      kernels_.attend[dtype](args_, task.piece, scratch_ + worker * scratch_floats_, parts_[task.part]);
      // Whoever finishes a group's last piece joins them all; the order of joining is that of the context.
      if (unfinished_[task.group].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
      const MlaGroup& group = groups_[task.group];
      kernels_.merge[dtype](args_, group.piece, &parts_[group.first_part], group.parts);
    });
  }

 private:
  // Heads are kept together, unless there are too few chunks for the threads. No head's sums depend on its company.
  void cut(int64_t first, int64_t last) {
    int64_t chunks = 0;
    for (int64_t b = first; b < last; ++b) chunks += ceil_div(args_.seq_lens[b], kMlaChunk);
    const int64_t wanted = ceil_div(2 * int64_t{args_.threads}, std::max<int64_t>(1, chunks));
    const int64_t shares = std::clamp<int64_t>(wanted, 1, ceil_div(args_.heads, kLeastHeads));
    group_heads_ = ceil_div(ceil_div(args_.heads, shares), kLeastHeads) * kLeastHeads;
    for (int64_t b = first; b < last; ++b) {
      if (args_.seq_lens[b] > 0) {
        cut(b);
      } else {
        clear(b);
      }
    }
  }

  void cut(int64_t sequence) {
    const int64_t end = args_.seq_lens[sequence], chunks = ceil_div(end, kMlaChunk);
    const auto first_part = static_cast<int64_t>(tasks_.size()), first_group = static_cast<int64_t>(groups_.size());
    const int64_t shares = ceil_div(args_.heads, group_heads_);
    for (int64_t s = 0; s < shares; ++s)
      groups_.push_back({piece(sequence, s, 0, end), first_part + s * chunks, chunks});
    for (int64_t c = 0; c < chunks; ++c)
      for (int64_t s = 0; s < shares; ++s)
        tasks_.push_back({piece(sequence, s, c * kMlaChunk, std::min(end, (c + 1) * kMlaChunk)), first_group + s,
                          first_part + s * chunks + c});
  }

  MlaPiece piece(int64_t sequence, int64_t share, int64_t begin, int64_t end) const {
    const int64_t first = share * group_heads_;
    return {sequence, first, std::min(args_.heads, first + group_heads_), begin, end};
  }

  void clear(int64_t sequence) const {
    const int64_t bytes = dtype_bytes(args_.dtype);
    std::memset(static_cast<char*>(args_.out) + sequence * args_.out_stride * bytes, 0,
                static_cast<size_t>(args_.heads * args_.latent * bytes));
  }

  void lay_out(Workspace& workspace) {
    const auto padded = [&](int64_t count) { return ceil_div(count, kernels_.pad) * kernels_.pad; };
    const int64_t columns = padded(args_.latent);
    const int64_t heads = std::min(group_heads_, args_.heads), lanes = padded(heads);
    const int64_t values_floats = Workspace::aligned_floats(heads * columns);
    const int64_t partial_floats = values_floats + Workspace::aligned_floats(2 * lanes);
    scratch_floats_ = Workspace::aligned_floats(kernels_.scratch_floats(heads, args_.latent, args_.rotary));
    const auto tasks = static_cast<int64_t>(tasks_.size());
    float* base = workspace.floats(tasks * partial_floats + args_.threads * scratch_floats_);
    for (int64_t i = 0; i < tasks; ++i, base += partial_floats)
      parts_.push_back({base + values_floats, base + values_floats + lanes, base});
    scratch_ = base;
  }

  const MlaArgs& args_;
  const MlaKernels& kernels_ = active_kernels();
  int64_t group_heads_ = 0, scratch_floats_ = 0;
  std::vector<MlaTask> tasks_;
  std::vector<MlaGroup> groups_;
  std::vector<Partial> parts_;
  std::unique_ptr<std::atomic<int64_t>[]> unfinished_;
  float* scratch_ = nullptr;
};

}  // namespace

void mla_decode(const MlaArgs& args) {
  thread_local Workspace workspace;
  for (int64_t first = 0; first < args.batch;) {
    const int64_t last = Wave::end_of(args, first);
    Wave(args, workspace, first, last).run();
    first = last;
  }
}

}  // namespace moelight
