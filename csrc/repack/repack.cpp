// A table is turned some lines at a time, by way of the room: their columns then lie beside each other. What is left is
// a table of these pieces of columns, which change places along its cycles.

#include "repack.h"

#include <algorithm>
#include <cstring>

#include "cells.h"
#include "moelight/cpu.h"

namespace moelight {
namespace {

TurnLines turn_lines_of(Cells cells) {
#if defined(__x86_64__)
  if (active_isa() != Isa::kScalar) return turn_lines_avx2(cells);
#endif
  return turn_lines_scalar(cells);
}

uint32_t in_order(uint32_t word) {
  uint32_t result = 0;
  for (int p = 0; p < 8; ++p) result |= ((word >> (4 * kAwqPlaces[p])) & 15) << (4 * p);
  return result;
}

// The sum of each code and `bias`, a code for each of them, whose last carry is lost.
uint32_t biased(uint32_t word, uint32_t bias, uint32_t tops) {
  return ((word & ~tops) + (bias & ~tops)) ^ ((word ^ bias) & tops);
}

void change_codes(const Table& table) {
  uint32_t bias = 0, tops = 0;
  for (int shift = 0; shift < 32; shift += table.bits) {
    bias |= (static_cast<uint32_t>(table.bias) & ((1u << table.bits) - 1)) << shift;
    tops |= 1u << (shift + table.bits - 1);
  }
  for (int64_t i = 0; i < table.lines * table.width; ++i) {
    uint32_t word;
    std::memcpy(&word, table.at + 4 * i, sizeof word);
    word = biased(table.awq_order ? in_order(word) : word, bias, tops);
    std::memcpy(table.at + 4 * i, &word, sizeof word);
  }
}

// The largest number of lines that divides all of them and fits `bytes`, at least one.
int64_t lines_together(const Table& table, int64_t bytes) {
  const int64_t max_lines = std::min(table.lines, bytes / table.line_bytes());
  for (int64_t lines = max_lines; lines > 1; --lines)
    if (table.lines % lines == 0) return lines;
  return 1;
}

// Pieces of `bytes` each, [lines, width] of them, as [width, lines].
class PieceMatrix {
 public:
  PieceMatrix(char* at, int64_t lines, int64_t width, int64_t bytes)
      : at_(at), lines_(lines), width_(width), bytes_(bytes) {}

  // `buffer` holds a piece.
  void turn(char* buffer, int64_t buffer_bytes) {
    const int64_t count = lines_ * width_;
    auto* const marks = reinterpret_cast<uint8_t*>(buffer + bytes_);
    const bool marked = (count + 7) / 8 <= buffer_bytes - bytes_;
    if (marked) std::memset(marks, 0, static_cast<size_t>((count + 7) / 8));
    for (int64_t first = 1; first < count - 1; ++first) {
      if (marked ? (marks[first / 8] >> (first % 8) & 1) != 0 : !is_least(first)) continue;
      std::memcpy(buffer, piece(first), size());
      int64_t to = first, coming[kAhead];
      for (int64_t k = 0, at = first; k < kAhead; ++k) fetch(coming[k] = at = source(at));
      for (int64_t k = 0, from; (from = coming[k]) != first; k = (k + 1) % kAhead) {
        fetch(coming[k] = source(coming[(k + kAhead - 1) % kAhead]));
        std::memcpy(piece(to), piece(from), size());
        to = from;
        if (marked) marks[to / 8] = static_cast<uint8_t>(marks[to / 8] | 1u << (to % 8));
      }
      std::memcpy(piece(to), buffer, size());
    }
  }

 private:
  static constexpr int64_t kAhead = 8, kFetched = 256;  // pieces, bytes of each

  void fetch(int64_t i) const {
    for (int64_t at = 0; at < std::min(bytes_, kFetched); at += 64) __builtin_prefetch(piece(i) + at, 1);
  }
  // Which piece comes to place `to`.
  int64_t source(int64_t to) const { return to % lines_ * width_ + to / lines_; }
  // Whether no place of its cycle is before `first`.
  bool is_least(int64_t first) const {
    int64_t at = source(first);
    while (at > first) at = source(at);
    return at == first;
  }
  char* piece(int64_t i) const { return at_ + i * bytes_; }
  size_t size() const { return static_cast<size_t>(bytes_); }

  char* const at_;
  const int64_t lines_, width_, bytes_;
};

}  // namespace

void turn(const Table& table, char* buffer, int64_t buffer_bytes) {
  if (table.bits != 0) change_codes(table);
  const int64_t together = lines_together(table, buffer_bytes), bytes = together * table.line_bytes();
  if (together > 1 || table.cells == Cells::kAwqCodes) {
    const TurnLines turn_lines = turn_lines_of(table.cells);
    for (int64_t first = 0; first < table.lines; first += together) {
      char* const lines = table.at + first * table.line_bytes();
      std::memcpy(buffer, lines, static_cast<size_t>(bytes));
      turn_lines(buffer, together, table.width, lines);
    }
  }
  if (together < table.lines)
    PieceMatrix(table.at, table.lines / together, table.width, together * cell_bytes(table.cells))
        .turn(buffer, buffer_bytes);
}

}  // namespace moelight
