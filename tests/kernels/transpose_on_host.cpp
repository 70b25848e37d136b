// turn16 of moelight/transpose_avx512.h against loops, for every number of columns up to a unit's and of lines over
// blocks of thirty-two. Exits with 0 if all are equal and nothing but the places of the result is written.

#include "moelight/transpose_avx512.h"

#include <cstdio>
#include <vector>

int main() {
  for (int64_t columns = 1; columns <= 64; ++columns) {
    for (const int64_t lines : {1, 2, 31, 32, 33, 64, 95, 100}) {
      const int64_t gap = columns + 3, room = lines + 5;
      std::vector<uint16_t> from(static_cast<size_t>((lines - 1) * gap + columns));
      std::vector<uint16_t> to(static_cast<size_t>(columns * room), 7);
      for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint16_t>(i * 40503 + 11);
      moelight::turn16(reinterpret_cast<const char*>(from.data()), 2 * gap, columns, lines,
                       reinterpret_cast<char*>(to.data()), 2 * room);
      for (int64_t c = 0; c < columns; ++c) {
        for (int64_t l = 0; l < room; ++l) {
          const uint16_t wanted = l < lines ? from[static_cast<size_t>(l * gap + c)] : 7;
          if (to[static_cast<size_t>(c * room + l)] == wanted) continue;
          std::printf("%ld columns, %ld lines: column %ld, line %ld\n", long(columns), long(lines), long(c), long(l));
          return 1;
        }
      }
    }
  }
  return 0;
}
