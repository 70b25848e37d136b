// Fills the panels of integers.h for NEON, thirty-two columns of a row at once. Internal linkage.
#pragma once

#include "codes_neon.h"

namespace moelight {
namespace {

// Of eight columns the even ones, then the odd ones.
constexpr uint8_t kPairedOrder[16] = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15};

// As a panel takes them.
template <class Format>
inline Codes panel_codes(const uint8_t* line, int64_t k) {
  const Codes codes = codes_of(Format(), line, k);
  return Format::kPairs ? in_order(codes, kPairedOrder) : codes;
}

inline void store_words(uint8x16_t codes, uint8_t* to) {
  const uint32x4_t words = vreinterpretq_u32_u8(codes);
  const uint32_t four[4] = {vgetq_lane_u32(words, 0), vgetq_lane_u32(words, 1), vgetq_lane_u32(words, 2),
                            vgetq_lane_u32(words, 3)};
  for (int i = 0; i < 4; ++i) std::memcpy(to + 4 * i * kPanelRows, &four[i], 4);
}

template <class Format>
struct WidePanels : PlainPanels<Format> {};

template <class Format>
  requires kHasCodes<Format>
struct WidePanels<Format> {
  static void fill(const Quantized& q, const IntegerForm& form, int64_t row, int64_t rows, int64_t first, int64_t size,
                   Fetched& fetched, Panel& to) {
    const int64_t aligned = size / 32 * 32;
    for (int64_t r = 0; r < rows; ++r) {
      const uint8_t* const line = q.codes + (row + r) * q.row_bytes;
      for (int64_t k = 0; k < aligned; k += 32) {
        if (fetched.next != nullptr) {
          __builtin_prefetch(fetched.next, 0, 2);
          fetched.next += 32 * q.row_bytes / q.columns;
        }
        const Codes codes = panel_codes<Format>(line, first + k);
        uint8_t* const words = to.codes + k * kPanelRows + 4 * r;
        store_words(codes.low, words), store_words(codes.high, words + 16 * kPanelRows);
      }
      plain_codes<Format>(q, form, row + r, first, aligned, size, r, to);
    }
    plain_lines<Format>(q, form, row, rows, first, size, 0, to);
  }
};

}  // namespace
}  // namespace moelight
