#include "moelight/threads.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "moelight/signals.h"

namespace moelight {
namespace {

thread_local bool inside_body = false;

// How long a thread looks out for what it waits for before it sleeps: waking it takes 22 us, and 7 of who wakes it.
// Measured at 50 and 200; between them by choice.
constexpr std::chrono::microseconds kLookOut{100};

struct Job {
  ParallelBody body;
  void* context;
  int64_t n;
  std::atomic<int64_t> next{0};

  void work(int worker) noexcept {
    const bool nested = std::exchange(inside_body, true);
    for (int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < n;
         i = next.fetch_add(1, std::memory_order_relaxed)) {
      body(context, i, worker);
    }
    inside_body = nested;
  }
};

// A job offers `places_` tickets. A thread that wakes takes one, works, and signs off through `busy_`. When the
// caller finds no index left it withdraws the tickets nobody took, so a slow waker is never waited for.
class Pool {
 public:
  void run(int threads, Job& job) {
    std::lock_guard<std::mutex> turn(turn_);
    const int helpers = grow(threads - 1);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
      places_ = helpers;
    }
    for (int i = 0; i < helpers; ++i) wake_.notify_one();
    job.work(0);
    std::unique_lock<std::mutex> lock(mutex_);
    places_ = 0;
    if (busy_ > 0) {
      lock.unlock();
      look_out([this] { return busy_.load(std::memory_order_relaxed) == 0; });
      lock.lock();
    }
    done_.wait(lock, [this] { return busy_ == 0; });
    job_ = nullptr;
  }

 private:
  // Threads are detached and the pool is never destroyed, so the end of the process joins nothing.
  int grow(int wanted) {
    try {
      while (size_ < wanted) {
        const NoSignals guard;
        std::thread([this] { serve(); }).detach();
        ++size_;
      }
    } catch (const std::system_error&) {
      // The system gives no more threads: go on with those there are.
    }
    return std::min(size_, wanted);
  }

  // Whether `seen` came true in time. Others who want the processor get it at once.
  template <class F>
  static bool look_out(F&& seen) {
    const auto until = std::chrono::steady_clock::now() + kLookOut;
    while (!seen()) {
      if (std::chrono::steady_clock::now() >= until) return false;
      std::this_thread::yield();
    }
    return true;
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      while (places_ == 0) {
        lock.unlock();
        const bool seen = look_out([this] { return places_.load(std::memory_order_relaxed) > 0; });
        lock.lock();
        if (!seen) wake_.wait(lock, [this] { return places_ > 0; });
      }
      const int worker = places_--;
      ++busy_;
      Job& job = *job_;
      lock.unlock();
      job.work(worker);
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::mutex turn_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  std::atomic<int> places_{0}, busy_{0};  // changed under the lock, looked at without
  int size_ = 0;
};

std::atomic<Pool*> current{nullptr};

// The child of a fork has none of the pool's threads and perhaps its locks held: it forgets the pool.
void forget_pool() { current.store(nullptr); }

Pool& pool() {
  static const int registered = pthread_atfork(nullptr, nullptr, forget_pool);
  static_cast<void>(registered);
  Pool* existing = current.load();
  if (existing != nullptr) return *existing;
  Pool* fresh = new Pool;
  if (current.compare_exchange_strong(existing, fresh)) return *fresh;
  delete fresh;
  return *existing;
}

}  // namespace

void run_parallel(int threads, int64_t n, ParallelBody body, void* context) {
  const int useful = static_cast<int>(std::min<int64_t>(threads, n));
  Job job{body, context, n};
  if (useful <= 1 || inside_body) {
    job.work(0);
  } else {
    pool().run(useful, job);
  }
}

}  // namespace moelight
