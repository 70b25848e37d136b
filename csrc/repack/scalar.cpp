#include "cells.h"

namespace moelight {
namespace {

template <class Cell>
void turn_all(const char* from, int64_t lines, int64_t width, char* to) {
  turn_singly<Cell>(from, lines, width, 0, 0, width, to);
}

void turn_awq(const char* from, int64_t lines, int64_t width, char* to) {
  turn_awq_singly(from, lines, width, 0, 0, width, to);
}

}  // namespace

TurnLines turn_lines_scalar(Cells cells) {
  switch (cells) {
    case Cells::kBytes:
      return turn_all<uint8_t>;
    case Cells::kHalves:
      return turn_all<uint16_t>;
    case Cells::kWords:
      return turn_all<uint32_t>;
    default:
      return turn_awq;
  }
}

}  // namespace moelight
