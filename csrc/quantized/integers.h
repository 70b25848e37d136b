// Quantised matrices as whole numbers: what products with int8 activations multiply. Internal linkage: every
// instruction set compiles its own copy.
//
// A number is (code - zero) scale: codes are unsigned bytes, scales and zero points those of a row in one group of
// columns. In forms of parts it is (code - zero) step scale - low least: `step` and `low` are whole numbers of one part
// of the group. A panel holds the codes of kPanelRows rows as vectors of products want them: four
// columns of each row beside each other, for sums in one lane a row.
#pragma once

#include <algorithm>
#include <cstring>

#include "numbers.h"

namespace moelight {
namespace {

constexpr int64_t kPanelRows = 32, kPanelColumns = 512, kLeastPart = 16, kMostGroup = 256;
constexpr int64_t kPanelParts = kPanelColumns / kLeastPart, kPanelGroups = kPanelColumns / 32;

// How a matrix is multiplied.
struct IntegerForm {
  int64_t group;  // columns of a token that share a scale; divides kPanelColumns
  int64_t part;   // columns of a row that share a step, where they are fewer; divides the group
  bool pairs;     // of eight columns first the even ones, then the odd ones: the order in words of 4-bit codes
  int zero;       // of all codes, or -1: scales have zero points of their own
  bool least;     // something is taken off all numbers of a part

  bool parted() const { return part < group; }
};

struct Panel {
  alignas(64) uint8_t codes[kPanelColumns * kPanelRows];  // [columns / 4][rows][4]
  alignas(64) float scales[kPanelGroups][kPanelRows];
  alignas(64) int32_t zeros[kPanelGroups][kPanelRows];    // where the form has no zero
  alignas(64) float least[kPanelGroups][kPanelRows];      // where the form has it
  alignas(64) int32_t steps[kPanelParts][kPanelRows];     // of forms of parts
  alignas(64) int32_t lows[kPanelParts / 2][kPanelRows];  // two parts' in one word, where the form has `least`
};

// What is fetched while a panel is filled: line after line.
struct Fetched {
  const char* next;  // null: nothing
};

inline int64_t token_group(int64_t group, int64_t groups) {
  if (groups == 1) return 128;
  return group % 128 == 0 ? 128 : group % 64 == 0 ? 64 : 32;
}

// The form of matrices like one that `whole_numbers` says has one.
inline IntegerForm integer_form(const Quantized& q) {
  const int64_t group = token_group(q.group, q.groups);
  switch (q.packing) {
    case Packing::kInt8:
      return {group, group, false, q.zeros == nullptr ? 128 : -1, false};
    case Packing::kPacked:
      return {group, group, q.bits == 4, q.zeros == nullptr ? 1 << (q.bits - 1) : -1, false};
    case Packing::kGptq:
      return {group, group, q.bits == 4, -1, false};
    case Packing::kAwq:
      return {group, group, false, -1, false};
    case Packing::kMx:
      return {32, 32, true, 12, false};
    case Packing::kMxBlocks:
      return {32, 32, false, 12, false};
    case Packing::kQ4_K:
    case Packing::kQ5_K:
      return {256, 32, false, 0, true};
    case Packing::kQ6_K:
      return {256, 16, false, 32, false};
    case Packing::kQ4_0:
      return {32, 32, false, 8, false};
    default:
      return {32, 32, false, 128, false};
  }
}

// Twice the numbers of E2M1, plus 12.
constexpr uint8_t kE2m1Codes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

inline uint8_t code_at(const Quantized& q, int64_t row, int64_t k) {
  const uint8_t* const line = q.codes + row * q.row_bytes;
  const auto word = [&q](int64_t i, int shift) {
    return static_cast<uint8_t>((word_at(q.codes, i) >> shift) & ((1u << q.bits) - 1));
  };
  switch (q.packing) {
    case Packing::kInt8:
      return line[k] ^ 0x80;
    case Packing::kPacked:
      return q.bits == 8 ? line[k] : (line[k / 2] >> (4 * (k % 2))) & 15;
    case Packing::kGptq:
      return word(k / (32 / q.bits) * q.rows + row, static_cast<int>(k % (32 / q.bits)) * q.bits);
    case Packing::kAwq:
      return word(k * (q.rows / 8) + row / 8, 4 * kAwqPlaces[row % 8]);
    case Packing::kMx:
      return kE2m1Codes[(line[k / 2] >> (4 * (k % 2))) & 15];
    case Packing::kMxBlocks:
      return kE2m1Codes[piece(line + k / 32 * 17 + 1, 16, 4, static_cast<int>(k % 32))];
    case Packing::kQ4_0:
      return static_cast<uint8_t>(piece(line + k / 32 * 18 + 2, 16, 4, static_cast<int>(k % 32)));
    case Packing::kQ4_K:
      return static_cast<uint8_t>(piece(line + k / 256 * 144 + 16, 32, 4, static_cast<int>(k % 256)));
    case Packing::kQ5_K: {
      const uint8_t* const p = line + k / 256 * 176;
      const int i = static_cast<int>(k % 256);
      return static_cast<uint8_t>(piece(p + 48, 32, 4, i) | piece(p + 16, 32, 1, i) << 4);
    }
    case Packing::kQ6_K: {
      const uint8_t* const p = line + k / 256 * 210;
      const int i = static_cast<int>(k % 256);
      return static_cast<uint8_t>(piece(p, 64, 4, i) | piece(p + 128, 32, 2, i) << 4);
    }
    default:
      return line[k / 32 * 34 + 2 + k % 32] ^ 0x80;
  }
}

// Of the group that column k belongs to.
struct IntegerLine {
  float scale;
  int32_t zero;
};

inline IntegerLine integer_line(const Quantized& q, int64_t row, int64_t k) {
  const uint8_t* const line = q.codes + row * q.row_bytes;
  switch (q.packing) {
    case Packing::kMx:
      return {half_power_of(static_cast<const uint8_t*>(q.scales)[row * q.groups + k / 32]), 12};
    case Packing::kMxBlocks:
      return {half_power_of(line[k / 32 * 17]), 12};
    case Packing::kQ4_0:
      return {half_at(line + k / 32 * 18), 8};
    case Packing::kQ8_0:
      return {half_at(line + k / 32 * 34), 128};
    default: {
      const Line by = line_of(q, row, k / q.group);
      return {by.scale, static_cast<int32_t>(by.zero) + (q.packing == Packing::kInt8 ? 128 : 0)};
    }
  }
}

// Where column k of a panel stands among its bytes of one row.
inline int64_t place_of(const IntegerForm& form, int64_t k) {
  return form.pairs ? k / 8 * 8 + k % 2 * 4 + k % 8 / 2 : k;
}

// Of a group of row `at` of a panel, whose block is given: Q4_K, Q5_K or Q6_K.
inline void plain_parts(const Quantized& q, const uint8_t* block, int64_t group, int64_t at, Panel& to) {
  if (q.packing == Packing::kQ6_K) {
    to.scales[group][at] = half_at(block + 208);
    for (int64_t i = 0; i < 16; ++i) to.steps[16 * group + i][at] = static_cast<int8_t>(block[192 + i]);
    return;
  }
  const KScales parts(block + 4);
  to.scales[group][at] = half_at(block), to.least[group][at] = half_at(block + 2);
  for (int64_t i = 0; i < 8; ++i) to.steps[8 * group + i][at] = parts.scale[i];
  for (int64_t i = 0; i < 4; ++i) to.lows[4 * group + i][at] = parts.least[2 * i] | parts.least[2 * i + 1] << 16;
}

// Scales, zero points and what parts have of `count` rows from `row` on, to those from `at` on.
inline void plain_lines(const Quantized& q, const IntegerForm& form, int64_t row, int64_t count, int64_t first,
                        int64_t size, int64_t at, Panel& to) {
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t k = 0, g = 0; k < size; k += form.group, ++g) {
      if (form.parted()) {
        const uint8_t* const line = q.codes + (row + r) * q.row_bytes;
        plain_parts(q, line + (first + k) / 256 * block_size(q.packing).bytes, g, at + r, to);
        continue;
      }
      const IntegerLine line = integer_line(q, row + r, first + k);
      to.scales[g][at + r] = line.scale, to.zeros[g][at + r] = line.zero;
    }
  }
}

inline void plain_codes(const Quantized& q, const IntegerForm& form, int64_t row, int64_t count, int64_t first,
                        int64_t size, int64_t at, Panel& to) {
  const int64_t places = (size + 7) / 8 * 8;
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t k = 0; k < places; ++k) {
      const int64_t place = place_of(form, k);
      to.codes[(place / 4 * kPanelRows + at + r) * 4 + place % 4] = k < size ? code_at(q, row + r, first + k) : 0;
    }
  }
}

// Columns [first, first + size) of `rows` rows from `row` on, size at most kPanelColumns; of what has no code in a last
// word or row, nobody uses the sums. `first` is a multiple of kPanelColumns.
inline void plain_panel(const Quantized& q, const IntegerForm& form, int64_t row, int64_t rows, int64_t first,
                        int64_t size, Fetched&, Panel& to) {
  plain_codes(q, form, row, rows, first, size, 0, to);
  plain_lines(q, form, row, rows, first, size, 0, to);
}

}  // namespace

// Why a matrix has no whole numbers to multiply with int8 activations, or null.
inline const char* no_whole_numbers(const Quantized& q) {
  const auto grouped = [&q] { return q.groups == 1 || q.group % 32 == 0; };
  switch (q.packing) {
    case Packing::kInt8:
    case Packing::kPacked:
    case Packing::kGptq:
    case Packing::kAwq:
      if (q.bits == 2) return "codes of 2 bits are not multiplied by int8 activations";
      if (!grouped()) return "int8 activations need groups of a multiple of 32 columns";
      if (q.order == nullptr) return nullptr;
      for (int64_t k = 0; k < q.columns; ++k)
        if (q.order[k] != k / q.group) return "int8 activations need columns in the order of their groups";
      return nullptr;
    case Packing::kMx:
    case Packing::kMxBlocks:
    case Packing::kQ4_0:
    case Packing::kQ8_0:
    case Packing::kQ4_K:
    case Packing::kQ5_K:
    case Packing::kQ6_K:
      return nullptr;
    default:
      return "its numbers are no integers times scales, as int8 activations need them";
  }
}

}  // namespace moelight
