// Fetching ahead of the sweeps. Internal linkage: every instruction set has its own copy.
#pragma once

#include <cstdint>

namespace moelight {
namespace {

// Rows that lie in one block.
struct LatentRun {
  const char* rows;
  int64_t count;
};

// Fetches runs into the cache, a fixed number of bytes before they are read: the processor's own prefetcher stops at
// the end of every page. Lines are asked for one by one as others are consumed; in bursts they choke the fill buffers
// and nothing is gained.
class Lead {
 public:
  Lead(const LatentRun* runs, const LatentRun* end, int64_t row_bytes) : row_bytes_(row_bytes), next_(runs), end_(end) {
    next_run();
    pass(kAheadBytes);
  }

  // To be told of every byte that a sweep reads.
  void pass(int64_t bytes) {
    for (owed_ += bytes; owed_ >= kLineBytes; owed_ -= kLineBytes) fetch();
  }
  template <int64_t kBytes>
  void pass() {
    if constexpr (kBytes % kLineBytes == 0) {
      for (int64_t i = 0; i < kBytes / kLineBytes; ++i) fetch();
    } else {
      pass(kBytes);
    }
  }

 private:
  static constexpr int64_t kLineBytes = 64, kAheadBytes = 6144;

  void fetch() {
    __builtin_prefetch(at_);
    at_ += step_;
    if (at_ >= stop_) next_run();
  }
  void next_run() {
    if (next_ != end_) {
      at_ = next_->rows, stop_ = at_ + next_->count * row_bytes_, ++next_;
    } else {
      step_ = 0;
    }
  }

  const char *at_ = nullptr, *stop_ = nullptr;
  int64_t step_ = kLineBytes, owed_ = 0, row_bytes_;
  const LatentRun *next_, *end_;
};

// For sweeps over rows that are in the cache already.
struct NoLead {
  void pass(int64_t) {}
  template <int64_t kBytes>
  void pass() {}
};

}  // namespace
}  // namespace moelight
