// Cuts decode attention into pieces, hands them to the threads and joins what they return. Does not depend on any
// instruction set.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "gqa.h"
#include "moelight/cpu.h"
#include "moelight/threads.h"
#include "moelight/workspace.h"

namespace moelight {
namespace {

int64_t first_position(const GqaArgs& args, int64_t sequence) {
  const int64_t length = args.seq_lens[sequence];
  return args.window > 0 ? std::max<int64_t>(0, length - args.window) : 0;
}

// Some query heads of one sequence; their partials lie side by side in the order of the context.
struct GqaGroup {
  GqaPiece piece;
  int64_t first_part, parts;
};

struct GqaTask {
  GqaPiece piece;
  int64_t group, part;
};

// Tasks that every thread should find, so that none waits long for another at the end.
constexpr int64_t kTasksPerThread = 8;

class Decode {
 public:
  Decode(const GqaArgs& args, Workspace& workspace) : args_(args), kernels_(gqa_active()) {
    cut();
    heads_ = share_ * (args.q_heads / args.kv_heads);
    const int64_t padded = (args.head_dim + kernels_.pad - 1) / kernels_.pad * kernels_.pad;
    values_floats_ = Workspace::aligned_floats(heads_ * padded);
    partial_floats_ = values_floats_ + Workspace::aligned_floats(2 * heads_);
    scratch_floats_ = Workspace::aligned_floats(gqa_scratch_floats(heads_, padded));
    const auto tasks = static_cast<int64_t>(tasks_.size());
    lay_out(workspace.floats(tasks * partial_floats_ + args.threads * scratch_floats_));
  }

  void run() {
    const int dtype = static_cast<int>(args_.dtype);
    const auto attend = (args_.int8 ? kernels_.attend_int8 : kernels_.attend)[dtype];
    const auto merge = (args_.int8 ? kernels_.merge_int8 : kernels_.merge)[dtype];
    parallel_for(args_.threads, static_cast<int64_t>(tasks_.size()), [&](int64_t i, int worker) {
      const GqaTask& task = tasks_[i];
      attend(args_, task.piece, scratch_ + worker * scratch_floats_, parts_[task.part]);
      // Whoever finishes a group's last piece joins them all; the order of joining is that of the context.
      if (unfinished_[task.group].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
      const GqaGroup& group = groups_[task.group];
      merge(args_, group.piece, &parts_[group.first_part], group.parts);
    });
  }

 private:
  // The heads of a sequence are kept together, because they lie together in a block, unless there are too few chunks
  // for the threads. No head's sums depend on its company.
  void cut() {
    int64_t chunks = 0;
    for (int64_t b = 0; b < args_.batch; ++b) chunks += chunks_of(b);
    const int64_t wanted = kTasksPerThread * args_.threads / std::max<int64_t>(1, chunks);
    share_ = args_.kv_heads / std::clamp<int64_t>(wanted, 1, args_.kv_heads);
    for (int64_t b = 0; b < args_.batch; ++b) {
      if (args_.seq_lens[b] > 0) {
        cut(b);
      } else {
        clear(b);
      }
    }
    unfinished_ = std::make_unique<std::atomic<int64_t>[]>(groups_.size());
    for (size_t g = 0; g < groups_.size(); ++g) unfinished_[g].store(groups_[g].parts, std::memory_order_relaxed);
  }

  int64_t chunks_of(int64_t sequence) const {
    return (args_.seq_lens[sequence] + kChunk - 1) / kChunk - first_position(args_, sequence) / kChunk;
  }

  void cut(int64_t sequence) {
    const int64_t begin = first_position(args_, sequence), end = args_.seq_lens[sequence];
    const int64_t chunks = chunks_of(sequence);
    const auto first_part = static_cast<int64_t>(tasks_.size()), first_group = static_cast<int64_t>(groups_.size());
    for (int64_t h = 0, s = 0; h < args_.kv_heads; h += share_, ++s)
      groups_.push_back({piece(sequence, h, begin, end), first_part + s * chunks, chunks});
    for (int64_t c = 0, at = begin; c < chunks; ++c) {
      const int64_t stop = std::min(end, (at / kChunk + 1) * kChunk);
      for (int64_t h = 0, s = 0; h < args_.kv_heads; h += share_, ++s)
        tasks_.push_back({piece(sequence, h, at, stop), first_group + s, first_part + s * chunks + c});
      at = stop;
    }
  }

  GqaPiece piece(int64_t sequence, int64_t head, int64_t begin, int64_t end) const {
    return {sequence, head, std::min(args_.kv_heads, head + share_), begin, end};
  }

  void clear(int64_t sequence) const {
    const int64_t bytes = dtype_bytes(args_.dtype);
    std::memset(static_cast<char*>(args_.out) + sequence * args_.out_stride * bytes, 0,
                static_cast<size_t>(args_.q_heads * args_.head_dim * bytes));
  }

  void lay_out(float* base) {
    for (size_t i = 0; i < tasks_.size(); ++i, base += partial_floats_) {
      parts_.push_back({base + values_floats_, base + values_floats_ + heads_, base});
    }
    scratch_ = base;
  }

  const GqaArgs& args_;
  const GqaKernels& kernels_;
  int64_t share_, heads_, values_floats_, partial_floats_, scratch_floats_;
  std::vector<GqaTask> tasks_;
  std::vector<GqaGroup> groups_;
  std::vector<Partial> parts_;
  std::unique_ptr<std::atomic<int64_t>[]> unfinished_;
  float* scratch_;
};

void append(const GqaArgs& args) {
  std::vector<int64_t> slots;
  for (int64_t b = 0; b < args.batch; ++b) {
    const int64_t last = args.seq_lens[b] - int64_t{1};
    const int32_t* table = args.tables + b * args.table_stride;
    slots.push_back(last < 0 ? -1 : table[last / args.block_size] * args.block_size + last % args.block_size);
  }
  kv_append({.dtype = args.dtype,
             .int8 = args.int8,
             .tokens = args.batch,
             .kv_heads = args.kv_heads,
             .head_dim = args.head_dim,
             .block_size = args.block_size,
             .k_cache = const_cast<void*>(args.k_cache),
             .k_stride = args.k_stride,
             .v_cache = const_cast<void*>(args.v_cache),
             .v_stride = args.v_stride,
             .k_scale = const_cast<float*>(args.k_scale),
             .k_scale_stride = args.k_scale_stride,
             .v_scale = const_cast<float*>(args.v_scale),
             .v_scale_stride = args.v_scale_stride,
             .k_new = args.k_new,
             .k_new_stride = args.k_new_stride,
             .v_new = args.v_new,
             .v_new_stride = args.v_new_stride,
             .slots = slots.data(),
             .threads = args.threads});
}

}  // namespace

const GqaKernels& gqa_active() {
#if defined(__x86_64__)
  if (active_isa() == Isa::kAvx512 && bf16_products() != Bf16Products::kWide) return gqa_avx512_bf16();
#endif
  return MOELIGHT_ACTIVE(gqa)();
}

void gqa_decode(const GqaArgs& args) {
  thread_local Workspace workspace;
  if (args.k_new != nullptr) append(args);
  Decode(args, workspace).run();
}

}  // namespace moelight
