// Cells turned one by one, for any processor. Internal linkage: every instruction set compiles its own copy.
#pragma once

#include <cstring>

#include "repack.h"

namespace moelight {
namespace {

// The place in an AWQ word of each of its eight rows.
constexpr int kAwqPlaces[8] = {0, 4, 1, 5, 2, 6, 3, 7};

// Cells of lines [first, lines) and columns [begin, end) of a table.
template <class Cell>
void turn_singly(const char* from, int64_t lines, int64_t width, int64_t first, int64_t begin, int64_t end, char* to) {
  for (int64_t j = begin; j < end; ++j) {
    for (int64_t i = first; i < lines; ++i) {
      std::memcpy(to + (j * lines + i) * static_cast<int64_t>(sizeof(Cell)),
                  from + (i * width + j) * static_cast<int64_t>(sizeof(Cell)), sizeof(Cell));
    }
  }
}

// Of a table of kAwqCodes; `begin` and `end` are multiples of eight.
inline void turn_awq_singly(const char* from, int64_t lines, int64_t width, int64_t first, int64_t begin, int64_t end,
                            char* to) {
  const int64_t words = width / 8;
  for (int64_t i = first; i < lines; ++i) {
    for (int64_t word = begin / 8; word < end / 8; ++word) {
      uint32_t columns[8];
      for (int64_t c = 0; c < 8; ++c)
        std::memcpy(&columns[c], from + 4 * ((8 * i + c) * words + word), sizeof columns[c]);
      for (int64_t p = 0; p < 8; ++p) {
        uint32_t row = 0;
        for (int c = 0; c < 8; ++c) row |= ((columns[c] >> (4 * kAwqPlaces[p])) & 15) << (4 * c);
        std::memcpy(to + 4 * ((8 * word + p) * lines + i), &row, sizeof row);
      }
    }
  }
}

}  // namespace
}  // namespace moelight
