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

#include "formats.h"

namespace moelight {
namespace {

constexpr int64_t kPanelRows = 32, kPanelColumns = 512, kLeastPart = 16, kMostGroup = 256;
constexpr int64_t kPanelParts = kPanelColumns / kLeastPart, kPanelGroups = kPanelColumns / 32;

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

// Where column k of a panel stands among its bytes of one row.
inline int64_t place_of(const IntegerForm& form, int64_t k) {
  return form.pairs ? k / 8 * 8 + k % 2 * 4 + k % 8 / 2 : k;
}

// Scales, zero points and what parts have of `count` rows from `row` on, to those from `at` on.
template <class Format>
void plain_lines(const Quantized& q, const IntegerForm& form, int64_t row, int64_t count, int64_t first, int64_t size,
                 int64_t at, Panel& to) {
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t k = 0, g = 0; k < size; k += form.group, ++g) {
      if constexpr (kParted<Format>) {
        const IntegerParts parts = Format::parts(Format::block_of(q, row + r, first + k));
        const int64_t count_of_parts = form.group / form.part;
        to.scales[g][at + r] = parts.scale, to.least[g][at + r] = parts.least;
        for (int64_t i = 0; i < count_of_parts; ++i) to.steps[count_of_parts * g + i][at + r] = parts.steps[i];
        for (int64_t i = 0; form.least && i < count_of_parts / 2; ++i)
          to.lows[count_of_parts / 2 * g + i][at + r] = parts.lows[2 * i] | parts.lows[2 * i + 1] << 16;
      } else {
        const IntegerLine line = Format::integer_line(q, row + r, first + k);
        to.scales[g][at + r] = line.scale, to.zeros[g][at + r] = line.zero, to.least[g][at + r] = line.least;
      }
    }
  }
}

// Codes of columns [k, size) of one row, to row `at` of a panel.
template <class Format>
void plain_codes(const Quantized& q, const IntegerForm& form, int64_t row, int64_t first, int64_t k, int64_t size,
                 int64_t at, Panel& to) {
  const auto put = [&](int64_t column, uint8_t code) {
    const int64_t offset = place_of(form, column);
    to.codes[(offset / 4 * kPanelRows + at) * 4 + offset % 4] = code;
  };
  if constexpr (kHasPoints<Format>) {  // which a point has together
    for (; k < size; k += 8) {
      const auto eight = Format::codes_in(Format::block_of(q, row, first + k), static_cast<int>((first + k) % 256 / 8));
      for (size_t i = 0; i < 8; ++i) put(k + static_cast<int64_t>(i), eight[i]);
    }
    return;
  }
  for (const int64_t end = (size + 7) / 8 * 8; k < end; ++k) put(k, k < size ? Format::code(q, row, first + k) : 0);
}

// Columns [first, first + size) of `rows` rows from `row` on, size at most kPanelColumns; of what has no code in a last
// word or row, nobody uses the sums. `first` is a multiple of kPanelColumns.
using FillPanel = void (*)(const Quantized&, const IntegerForm&, int64_t row, int64_t rows, int64_t first, int64_t size,
                           Fetched&, Panel&);

// In plain code; instruction sets have a struct of their own, which serves the formats that it knows faster.
template <class Format>
struct PlainPanels {
  static void fill(const Quantized& q, const IntegerForm& form, int64_t row, int64_t rows, int64_t first, int64_t size,
                   Fetched&, Panel& to) {
    for (int64_t r = 0; r < rows; ++r) plain_codes<Format>(q, form, row + r, first, 0, size, r, to);
    plain_lines<Format>(q, form, row, rows, first, size, 0, to);
  }
};

template <template <class> class Panels>
FillPanel panel_filler(const Quantized& q) {
  return with_format(q, [](auto format) -> FillPanel {
    if constexpr (kHasIntegers<decltype(format)>) return Panels<decltype(format)>::fill;
    return nullptr;
  });
}

// The form of matrices like one that has whole numbers.
inline IntegerForm integer_form(const Quantized& q) {
  return with_format(q, [&q](auto format) -> IntegerForm {
    if constexpr (kHasIntegers<decltype(format)>) return decltype(format)::form(q);
    return {};
  });
}

// Why a matrix has no whole numbers to multiply with int8 activations, or null.
inline const char* no_whole_numbers(const Quantized& q) {
  return with_format(q, [&q](auto format) -> const char* {
    using Format = decltype(format);
    if constexpr (Format::kTraits.bits == 2) return "codes of 2 bits are not multiplied by int8 activations";
    if constexpr (!kHasIntegers<Format>)
      return "its numbers are no integers times scales, as int8 activations need them";
    if constexpr (requires { Format::without_integers(q); }) return Format::without_integers(q);
    return nullptr;
  });
}

}  // namespace
}  // namespace moelight
