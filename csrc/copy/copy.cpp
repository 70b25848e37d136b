#include "copy.h"

#include <algorithm>
#include <cstring>

#include "moelight/threads.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace moelight {
namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kBytesPerTask = int64_t{1} << 18;
// From here on the copy would push everything else out of a core's cache, and is not read again soon.
constexpr int64_t kStreamFrom = int64_t{2} << 20;
// How far ahead of the reads lines are asked for: the processor's own prefetcher stops at the end of every 4 KiB.
[[maybe_unused]] constexpr int64_t kAhead = 2048;

#if defined(__SSE2__)
// Lines that go to memory without being read first. dst is aligned to a line.
void stream_lines(char* dst, const char* src, int64_t lines) {
  for (int64_t i = 0; i < lines; ++i, dst += kLine, src += kLine) {
    _mm_prefetch(src + kAhead, _MM_HINT_NTA);
    const auto* from = reinterpret_cast<const __m128i*>(src);
    auto* to = reinterpret_cast<__m128i*>(dst);
    const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a), _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c), _mm_stream_si128(to + 3, d);
  }
}

}  // namespace

void stream_copy(char* dst, const char* src, int64_t bytes) {
  const int64_t head = std::min<int64_t>(bytes, -reinterpret_cast<intptr_t>(dst) & (kLine - 1));
  std::memcpy(dst, src, static_cast<size_t>(head));
  const int64_t lines = (bytes - head) / kLine, done = head + lines * kLine;
  stream_lines(dst + head, src + head, lines);
  std::memcpy(dst + done, src + done, static_cast<size_t>(bytes - done));
  _mm_sfence();  // streamed lines are in order with what this thread says next
}
#else
}  // namespace

void stream_copy(char* dst, const char* src, int64_t bytes) { std::memcpy(dst, src, static_cast<size_t>(bytes)); }
#endif

void copy_pages(char* dst, const char* src, int64_t bytes, int threads) {
  if (bytes <= 0) return;
  // Pieces begin at lines of dst, so that no two threads write to one.
  const int64_t lead = reinterpret_cast<intptr_t>(dst) & (kLine - 1);
  const int64_t pieces = (lead + bytes + kBytesPerTask - 1) / kBytesPerTask;
  parallel_for(threads, pieces, [&](int64_t piece, int) {
    const int64_t begin = std::max<int64_t>(0, piece * kBytesPerTask - lead);
    const int64_t end = std::min(bytes, (piece + 1) * kBytesPerTask - lead);
    if (bytes >= kStreamFrom) {
      stream_copy(dst + begin, src + begin, end - begin);
    } else {
      std::memcpy(dst + begin, src + begin, static_cast<size_t>(end - begin));
    }
  });
}

}  // namespace moelight
