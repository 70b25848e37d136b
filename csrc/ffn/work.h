// The order of work of one call: units of products and of what prepares them, handed out one after the other. Does not
// depend on arithmetic.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "moelight/threads.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace moelight {
namespace {

// What is done to some tokens of one expert, each stage after all units of the stage before it.
enum Stage : int { kPrepareX = 0, kUp = 1, kPrepareInner = 2, kDown = 3 };
constexpr int kStages = 4;

// Some rows of a piece's weight and some of its tokens, counted from the piece's first.
struct Unit {
  Stage stage;
  int32_t piece;
  int64_t row, rows, token, tokens;
};

// Units are given out in their order, so whoever waits for a stage waits for threads that are at work: with fewer
// threads than asked for, or one, nothing stands still.
class Work {
 public:
  explicit Work(int64_t pieces) : left_(new std::atomic<int64_t>[static_cast<size_t>(pieces * kStages)]) {
    for (int64_t i = 0; i < pieces * kStages; ++i) left_[static_cast<size_t>(i)].store(0, std::memory_order_relaxed);
  }

  void add(const Unit& unit) {
    units_.push_back(unit);
    left(unit.piece, unit.stage).fetch_add(1, std::memory_order_relaxed);
  }

  // body(unit, next, worker), `next` being what the same worker gets afterwards, or null.
  template <class F>
  void run(int threads, F&& body) {
    const auto count = static_cast<int64_t>(units_.size());
    const int useful = static_cast<int>(std::min<int64_t>(threads, count));
    parallel_for(useful, useful, [&](int64_t, int worker) {
      for (int64_t i = next_.fetch_add(1, std::memory_order_relaxed), after; i < count; i = after) {
        after = next_.fetch_add(1, std::memory_order_relaxed);
        const Unit& unit = units_[static_cast<size_t>(i)];
        wait_for(unit);
        body(unit, after < count ? &units_[static_cast<size_t>(after)] : nullptr, worker);
        left(unit.piece, unit.stage).fetch_sub(1, std::memory_order_release);
      }
    });
  }

 private:
  std::atomic<int64_t>& left(int64_t piece, int stage) { return left_[static_cast<size_t>(piece * kStages + stage)]; }

  void wait_for(const Unit& unit) {
    for (int stage = 0; stage < unit.stage; ++stage) {
      for (int spins = 0; left(unit.piece, stage).load(std::memory_order_acquire) > 0; ++spins) {
#if defined(__x86_64__)
        _mm_pause();
#endif
        if (spins > 1000) std::this_thread::yield();
      }
    }
  }

  std::vector<Unit> units_;
  std::unique_ptr<std::atomic<int64_t>[]> left_;
  std::atomic<int64_t> next_{0};
};

}  // namespace
}  // namespace moelight
