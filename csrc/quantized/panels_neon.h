// Fills the panels of integers.h for NEON, thirty-two columns of a row at once. Internal linkage.
#pragma once

#include "codes_neon.h"

namespace moelight {
namespace {

// Of eight columns the even ones, then the odd ones.
constexpr uint8_t kPairedOrder[16] = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15};

// As a panel takes them.
template <Packing kPacking, int kBits>
inline Codes panel_codes(const uint8_t* line, int64_t k) {
  constexpr bool kPairs = kPacking == Packing::kMx || (kPacking == Packing::kPacked && kBits == 4);
  const Codes codes = codes_of<kPacking, kBits>(line, k);
  return kPairs ? in_order(codes, kPairedOrder) : codes;
}

inline void store_words(uint8x16_t codes, uint8_t* to) {
  const uint32x4_t words = vreinterpretq_u32_u8(codes);
  const uint32_t four[4] = {vgetq_lane_u32(words, 0), vgetq_lane_u32(words, 1), vgetq_lane_u32(words, 2),
                            vgetq_lane_u32(words, 3)};
  for (int i = 0; i < 4; ++i) std::memcpy(to + 4 * i * kPanelRows, &four[i], 4);
}

template <Packing kPacking, int kBits = 8>
void fill_codes(const Quantized& q, const IntegerForm& form, int64_t row, int64_t rows, int64_t first, int64_t size,
                Fetched& fetched, Panel& to) {
  const int64_t whole = size / 32 * 32;
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* const line = q.codes + (row + r) * q.row_bytes;
    for (int64_t k = 0; k < whole; k += 32) {
      if (fetched.next != nullptr) {
        __builtin_prefetch(fetched.next, 0, 2);
        fetched.next += 32 * q.row_bytes / q.columns;
      }
      const Codes codes = panel_codes<kPacking, kBits>(line, first + k);
      uint8_t* const words = to.codes + k * kPanelRows + 4 * r;
      store_words(codes.low, words), store_words(codes.high, words + 16 * kPanelRows);
    }
    for (int64_t k = whole; k < (size + 7) / 8 * 8; ++k) {
      const int64_t place = place_of(form, k);
      to.codes[(place / 4 * kPanelRows + r) * 4 + place % 4] = k < size ? code_at(q, row + r, first + k) : 0;
    }
  }
  plain_lines(q, form, row, rows, first, size, 0, to);
}

inline void fill_panel(const Quantized& q, const IntegerForm& form, int64_t row, int64_t rows, int64_t first,
                       int64_t size, Fetched& fetched, Panel& to) {
  const auto fill = [&](auto by) { by(q, form, row, rows, first, size, fetched, to); };
  switch (q.packing) {
    case Packing::kInt8:
      return fill(fill_codes<Packing::kInt8>);
    case Packing::kPacked:
      return q.bits == 4 ? fill(fill_codes<Packing::kPacked, 4>) : fill(fill_codes<Packing::kPacked, 8>);
    case Packing::kMx:
      return fill(fill_codes<Packing::kMx>);
    case Packing::kMxBlocks:
      return fill(fill_codes<Packing::kMxBlocks>);
    case Packing::kQ4_0:
      return fill(fill_codes<Packing::kQ4_0>);
    case Packing::kQ8_0:
      return fill(fill_codes<Packing::kQ8_0>);
    case Packing::kQ4_K:
      return fill(fill_codes<Packing::kQ4_K>);
    case Packing::kQ5_K:
      return fill(fill_codes<Packing::kQ5_K>);
    case Packing::kQ6_K:
      return fill(fill_codes<Packing::kQ6_K>);
    default:
      return fill(plain_panel);
  }
}

}  // namespace
}  // namespace moelight
