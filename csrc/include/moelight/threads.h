// One pool of threads for every kernel. Knows nothing of what it runs.
#pragma once

#include <cstdint>

namespace moelight {

// Runs body(context, i, worker) for every i in [0, n), each exactly once, on at most `threads` threads, the caller
// among them; 0 <= worker < threads and no two bodies run at once with the same worker. Returns when all are done.
// Bodies must not throw: the process would end. A call from within a body is worked through by its own thread. Calls
// from several threads at once take turns. After fork() the child starts a pool of its own.
using ParallelBody = void (*)(void* context, int64_t i, int worker) noexcept;
void run_parallel(int threads, int64_t n, ParallelBody body, void* context);

template <class F>
void parallel_for(int threads, int64_t n, F&& body) {
  auto call = [](void* context, int64_t i, int worker) noexcept { (*static_cast<F*>(context))(i, worker); };
  run_parallel(threads, n, call, static_cast<void*>(&body));
}

}  // namespace moelight
