// Copies of pages from one place in host memory to another, by several threads.
#pragma once

#include <cstdint>

namespace moelight {

// Any alignment, any length; the regions must not overlap. Large regions are written past the caches.
void copy_pages(char* dst, const char* src, int64_t bytes, int threads);

// One piece of such a copy, by the calling thread, past the caches.
void stream_copy(char* dst, const char* src, int64_t bytes);

}  // namespace moelight
