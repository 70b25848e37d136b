// Work on many rows, shared out by their bytes. Does not depend on what a row is.
#pragma once

#include <algorithm>
#include <cstdint>

#include "moelight/threads.h"

namespace moelight {

// body(begin, end) over rows of row_bytes each, some at a time, on as many of the threads as the bytes are worth.
template <class F>
void over_rows(int threads, int64_t rows, int64_t row_bytes, F&& body) {
  // Below this a second thread costs more than it brings.
  constexpr int64_t kBytesPerThread = int64_t{1} << 18;
  constexpr int64_t kBytesPerTask = int64_t{1} << 16;
  const int64_t rows_per_task = std::max<int64_t>(1, kBytesPerTask / std::max<int64_t>(1, row_bytes));
  const int64_t useful = rows * row_bytes / kBytesPerThread;
  parallel_for(static_cast<int>(std::clamp<int64_t>(useful, 1, threads)), (rows + rows_per_task - 1) / rows_per_task,
               [&](int64_t task, int) { body(task * rows_per_task, std::min(rows, (task + 1) * rows_per_task)); });
}

}  // namespace moelight
