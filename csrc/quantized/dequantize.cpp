// Whole matrices as numbers, rows shared out among threads. Does not depend on instruction set.

#include <algorithm>
#include <cstring>

#include "moelight/cpu.h"
#include "moelight/over_rows.h"
#include "quantized.h"

namespace moelight {
namespace {

// Rows unpacked together: those that share words and cache lines where codes are transposed.
constexpr int64_t kTogether = 16;

}  // namespace

void dequantize(const Quantized& from, DType type, void* out, int64_t stride, int threads) {
  const Unpack unpack = MOELIGHT_ACTIVE(unpack)(type);
  const int64_t bytes = dtype_bytes(type), sets = (from.rows + kTogether - 1) / kTogether;
  over_rows(threads, sets, kTogether * from.columns * bytes, [&](int64_t begin, int64_t end) {
    alignas(64) char buffer[kTogether * kMostColumns * sizeof(float)];
    for (int64_t row = kTogether * begin; row < std::min(from.rows, kTogether * end); row += kTogether) {
      const int64_t rows = std::min(kTogether, from.rows - row);
      char* const lines = static_cast<char*>(out) + row * stride * bytes;
      for (int64_t first = 0; first < from.columns; first += kMostColumns) {
        const int64_t size = std::min(kMostColumns, from.columns - first);
        char* const to = lines + first * bytes;
        if (size % kUnpackStep == 0) {
          unpack(from, row, rows, first, size, 0, to, stride * bytes);
          continue;
        }
        unpack(from, row, rows, first, size, 0, buffer, kMostColumns * bytes);
        for (int64_t r = 0; r < rows; ++r)
          std::memcpy(to + r * stride * bytes, buffer + r * kMostColumns * bytes, static_cast<size_t>(size * bytes));
      }
    }
  });
}

}  // namespace moelight
