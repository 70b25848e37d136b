// Tables turned in their own memory: what is stored by columns comes to lie by rows. The parts of a matrix of GPTQ or
// AWQ are tables that become those of packed integers, of the same bytes; codes of 8 bits and scales are turned alone.
//
// A table of `lines` of `width` cells becomes one of `width` lines of `lines` cells. Nothing of it is an index, so no
// contents lead beyond its memory.
#pragma once

#include <cstdint>

namespace moelight {

// A cell: one byte, two bytes, four bytes, or the eight codes of four bits that a row has in as many columns. A line of
// the last is stored as eight lines of width / 8 words, each of one column of eight rows in the order of AWQ.
enum class Cells : int { kBytes, kHalves, kWords, kAwqCodes };
constexpr int64_t cell_bytes(Cells cells) { return cells == Cells::kBytes ? 1 : cells == Cells::kHalves ? 2 : 4; }

struct Table {
  Cells cells;
  int64_t lines, width;
  char* at;
  // Of kWords, what becomes of the codes of `bits` bits in each: those of four bits are put in order from that of AWQ,
  // or `bias` is added, modulo 2^bits. 0 bits: nothing.
  bool awq_order;
  int bits, bias;

  int64_t line_bytes() const { return width * cell_bytes(cells); }
  int64_t bytes() const { return lines * line_bytes(); }
};

// `buffer` is memory of at least a line.
void turn(const Table& table, char* buffer, int64_t buffer_bytes);

// Writes [lines, width] cells as [width, lines] elsewhere.
using TurnLines = void (*)(const char* from, int64_t lines, int64_t width, char* to);
TurnLines turn_lines_scalar(Cells cells);
TurnLines turn_lines_avx2(Cells cells);

}  // namespace moelight
