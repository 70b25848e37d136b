// Fetching ahead of the sweeps of decode attention. Internal linkage: every instruction set has its own copy.
//
// Lines are asked for in the order of memory, one by one between the products: in bursts they choke the fill buffers,
// and where nothing is asked for, memory rests.
#pragma once

#include <cstdint>

namespace moelight {
namespace {

constexpr int64_t kLineBytes = 64;

// The rows of a chunk that lie in one block, of the first head of the piece; other heads follow.
struct KvRun {
  const char *keys, *values;
  const float *key_scales, *value_scales;
  int64_t count;
};

// Bytes to come.
struct Prefetch {
  const char* at;
  void operator()(int64_t byte) const { __builtin_prefetch(at + byte); }
};

// Walks through runs as the sweeps do, the keys of all and then their values, some bytes before them.
class Scout {
 public:
  Scout(const KvRun* runs, const int64_t& count, int64_t heads, int64_t head_bytes, int64_t row_bytes)
      : runs_(runs), count_(count), heads_(heads), head_bytes_(head_bytes), row_bytes_(row_bytes) {}

  // `lead`: how many bytes before the sweeps.
  void start(int64_t lead) {
    for (int64_t i = 0; i < lead; i += kStep) {
      const Prefetch ahead = take(kStep);
      for (int64_t j = 0; j < kStep; j += kLineBytes) ahead(j);
    }
  }

  // To be called for every byte that a sweep reads. What is taken at once may reach over the end of a head's rows.
  Prefetch take(int64_t bytes) {
    if (at_ >= stop_) next_run();
    const Prefetch ahead{at_};
    at_ += bytes;
    return ahead;
  }

 private:
  static constexpr int64_t kStep = 512;

  const char* rows(int64_t run) const { return run < count_ ? runs_[run].keys : runs_[run - count_].values; }

  void next_run() {
    if (head_ == heads_) head_ = 0, ++run_;
    if (run_ == 2 * count_) {
      at_ = stop_ - kLineBytes;
      return;
    }
    const char* const first = rows(run_);
    at_ = first + head_ * head_bytes_;
    stop_ = at_ + runs_[run_ < count_ ? run_ : run_ - count_].count * row_bytes_;
    if (head_++ == 0 && run_ + 1 < 2 * count_) translate(rows(run_ + 1));
  }

  // The addresses of another block are unknown to the processor: looking them up takes longer than all that the lead
  // covers.
  void translate(const char* rows) const {
    __builtin_prefetch(rows);
    __builtin_prefetch(rows + heads_ * head_bytes_ / 2);
  }

  const KvRun* runs_;
  const int64_t& count_;
  const int64_t heads_, head_bytes_, row_bytes_;
  const char *at_ = nullptr, *stop_ = nullptr;
  int64_t run_ = 0, head_ = 0;
};

// In place of both for rows that are in the cache already.
struct NoPrefetch {
  void operator()(int64_t) const {}
  NoPrefetch take(int64_t) const { return {}; }
};

}  // namespace
}  // namespace moelight
