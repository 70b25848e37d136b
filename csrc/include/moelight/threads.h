// The threads of every kernel, in teams. Does not depend on what they run.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace moelight {

// Runs body(context, i, worker) for every i in [0, n), each exactly once, on at most `threads` threads, the caller
// among them; 0 <= worker < threads and no two bodies run at once with the same worker. Returns when all are done.
// Bodies must not throw: the process would end. A call from within a body is worked through by its own thread. Calls
// from several threads take turns, unless they work with different teams. After fork() the child starts threads anew.
using ParallelBody = void (*)(void* context, int64_t i, int worker) noexcept;
void run_parallel(int threads, int64_t n, ParallelBody body, void* context);

template <class F>
void parallel_for(int threads, int64_t n, F&& body) {
  auto call = [](void* context, int64_t i, int worker) noexcept { (*static_cast<F*>(context))(i, worker); };
  run_parallel(threads, n, call, static_cast<void*>(&body));
}

// Processors that a thread may run on, by their numbers.
using Place = std::vector<int>;

class Pool;

// Threads of their own for the calls of one lane. Each place gets a thread, bound to it where the system allows that;
// without places they run anywhere. The caller is never bound: it stands in for the thread of the place it is on.
class ThreadTeam {
 public:
  ThreadTeam(int threads, std::vector<Place> places);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  // How many work at most, the caller among them.
  int threads() const { return threads_; }
  // Ends its threads when the call under way is done. Later calls are worked through by their callers alone.
  void end();
  // Its threads; null in the child of a fork, which has none of them.
  Pool* pool() const;

 private:
  const int threads_, fork_;
  std::unique_ptr<Pool> pool_;
};

// From now on the parallel calls of this thread run on `team` (null: on the threads all share). Returns the one before.
std::shared_ptr<ThreadTeam> use_team(std::shared_ptr<ThreadTeam> team);

}  // namespace moelight
