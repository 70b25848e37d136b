#include "moelight/threads.h"

#include <pthread.h>
#include <sched.h>

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
thread_local std::shared_ptr<ThreadTeam> my_team;

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

// Whether `seen` came true in time. Others who want the processor get it at once.
template <class F>
bool look_out(F&& seen) {
  const auto until = std::chrono::steady_clock::now() + kLookOut;
  while (!seen()) {
    if (std::chrono::steady_clock::now() >= until) return false;
    std::this_thread::yield();
  }
  return true;
}

#ifdef __linux__
int processor_here() { return ::sched_getcpu(); }

// Where the system refuses (the processor is gone, or not allowed any more) the thread runs where it may.
void stay_at(const Place& cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int processor : cpus)
    if (processor >= 0 && processor < CPU_SETSIZE) CPU_SET(processor, &set);
  static_cast<void>(::pthread_setaffinity_np(::pthread_self(), sizeof set, &set));
}
#else
int processor_here() { return -1; }
void stay_at(const Place&) {}
#endif

std::atomic<int> forks{0};

}  // namespace

// A job gives each thread it wants a ticket, the number of a worker. A thread that wakes takes its ticket, works, and
// signs off through `busy_`. When the caller finds no index left it withdraws the tickets not taken, so a slow waker is
// never waited for.
class Pool {
 public:
  explicit Pool(std::vector<Place> places) : places_(std::move(places)) {
    for (size_t at = 0; at < places_.size(); ++at) {
      for (const int processor : places_[at]) {
        if (processor < 0) continue;
        const auto index = static_cast<size_t>(processor);
        if (place_of_.size() <= index) place_of_.resize(index + 1, -1);
        place_of_[index] = static_cast<int>(at);
      }
    }
  }

  void run(int threads, Job& job) {
    std::lock_guard<std::mutex> turn(turn_);
    const int wanted = threads - 1, here = place_here();
    const int helpers = grow(here < 0 ? wanted : wanted + 1);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
      int tickets = 0;
      for (int i = 0; i < helpers && tickets < wanted; ++i)
        if (i != here) helpers_[i]->ticket = ++tickets;
    }
    for (int i = 0, woken = 0; i < helpers && woken < wanted; ++i)
      if (i != here) helpers_[i]->wake.notify_one(), ++woken;
    job.work(0);
    std::unique_lock<std::mutex> lock(mutex_);
    for (int i = 0; i < helpers; ++i) helpers_[i]->ticket = 0;
    if (busy_ > 0) {
      lock.unlock();
      look_out([this] { return busy_.load(std::memory_order_relaxed) == 0; });
      lock.lock();
    }
    done_.wait(lock, [this] { return busy_ == 0; });
    job_ = nullptr;
  }

  void end() {
    std::lock_guard<std::mutex> turn(turn_);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ending_ = true;
    }
    for (const auto& helper : helpers_) helper->wake.notify_one();
    for (const auto& helper : helpers_) helper->thread.join();
    helpers_.clear();
  }

 private:
  struct Helper {
    std::condition_variable wake;
    std::atomic<int> ticket{0};  // changed under the lock, looked at without
    std::thread thread;
  };

  int place_here() const {
    const int processor = place_of_.empty() ? -1 : processor_here();
    return processor < 0 || processor >= static_cast<int>(place_of_.size()) ? -1 : place_of_[processor];
  }

  // How many of `wanted` threads there are.
  int grow(int wanted) {
    if (!places_.empty()) wanted = std::min(wanted, static_cast<int>(places_.size()));
    try {
      while (static_cast<int>(helpers_.size()) < wanted && !ending_) {
        const NoSignals guard;
        const size_t at = helpers_.size();
        helpers_.push_back(std::make_unique<Helper>());
        try {
          helpers_[at]->thread = std::thread([this, at, helper = helpers_[at].get()] {
            if (at < places_.size()) stay_at(places_[at]);
            serve(*helper);
          });
        } catch (const std::system_error&) {
          helpers_.pop_back();
          throw;
        }
      }
    } catch (const std::system_error&) {
      // The system gives no more threads: go on with those there are.
    }
    return std::min(static_cast<int>(helpers_.size()), wanted);
  }

  void serve(Helper& me) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      while (me.ticket == 0) {
        if (ending_) return;
        lock.unlock();
        const bool seen = look_out([&me] { return me.ticket.load(std::memory_order_relaxed) > 0; });
        lock.lock();
        if (!seen) me.wake.wait(lock, [this, &me] { return me.ticket > 0 || ending_; });
      }
      const int worker = me.ticket.exchange(0);
      ++busy_;
      Job& job = *job_;
      lock.unlock();
      job.work(worker);
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  const std::vector<Place> places_;
  std::vector<int> place_of_;  // by processor; -1: none
  std::mutex turn_;            // held through a whole call; what grows and ends does so under it
  std::mutex mutex_;
  std::condition_variable done_;
  std::vector<std::unique_ptr<Helper>> helpers_;
  Job* job_ = nullptr;
  bool ending_ = false;       // changed under both
  std::atomic<int> busy_{0};  // changed under the lock, looked at without
};

namespace {

std::atomic<Pool*> current{nullptr};

// The child of a fork has none of the threads and perhaps their locks held: it forgets them.
void forget_threads() {
  current.store(nullptr);
  forks.fetch_add(1, std::memory_order_relaxed);
}

void watch_forks() {
  static const int registered = pthread_atfork(nullptr, nullptr, forget_threads);
  static_cast<void>(registered);
}

// Never destroyed, so the end of the process joins nothing.
Pool& shared_pool() {
  watch_forks();
  Pool* existing = current.load();
  if (existing != nullptr) return *existing;
  auto fresh = std::make_unique<Pool>(std::vector<Place>{});
  return current.compare_exchange_strong(existing, fresh.get()) ? *fresh.release() : *existing;
}

}  // namespace

ThreadTeam::ThreadTeam(int threads, std::vector<Place> places)
    : threads_(places.empty() ? threads : static_cast<int>(places.size())),
      fork_((watch_forks(), forks.load(std::memory_order_relaxed))),
      pool_(std::make_unique<Pool>(std::move(places))) {}

ThreadTeam::~ThreadTeam() {
  end();
  if (pool() == nullptr) static_cast<void>(pool_.release());
}

Pool* ThreadTeam::pool() const { return fork_ == forks.load(std::memory_order_relaxed) ? pool_.get() : nullptr; }

void ThreadTeam::end() {
  if (Pool* const team_pool = pool()) team_pool->end();
}

std::shared_ptr<ThreadTeam> use_team(std::shared_ptr<ThreadTeam> team) {
  return std::exchange(my_team, std::move(team));
}

void run_parallel(int threads, int64_t n, ParallelBody body, void* context) {
  Pool* const team_pool = my_team == nullptr ? nullptr : my_team->pool();
  const int max_threads = team_pool == nullptr ? threads : std::min(threads, my_team->threads());
  const int useful = static_cast<int>(std::min<int64_t>(max_threads, n));
  Job job{body, context, n};
  if (useful <= 1 || inside_body) {
    job.work(0);
  } else {
    (team_pool == nullptr ? shared_pool() : *team_pool).run(useful, job);
  }
}

}  // namespace moelight
