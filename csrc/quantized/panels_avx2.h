// Fills the panels of integers.h for AVX2, thirty-two columns of a row at once. Internal linkage.
#pragma once

#include "codes_avx2.h"
#include "integers.h"

namespace moelight {
namespace {

// Unsigned codes of columns [k, k + 32) as a panel takes them.
template <Packing kPacking, int kBits>
inline __m256i panel_codes(const uint8_t* line, int64_t k) {
  constexpr bool kPairs = kPacking == Packing::kMx || (kPacking == Packing::kPacked && kBits == 4);
  __m256i codes = codes_of<kPacking, kBits>(line, k);
  if constexpr (kPacking == Packing::kInt8 || kPacking == Packing::kQ8_0)
    codes = _mm256_xor_si256(codes, _mm256_set1_epi8(static_cast<char>(0x80)));
  if constexpr (kPacking == Packing::kMx || kPacking == Packing::kMxBlocks)
    codes = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(half_bytes_at(kE2m1Codes)), codes);
  if constexpr (kPairs)
    codes = _mm256_shuffle_epi8(codes, _mm256_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15, 0, 2, 4,
                                                        6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
  return codes;
}

template <Packing kPacking, int kBits = 8>
void fill_codes(const Quantized& q, const IntegerForm& form, int64_t row, int64_t rows, int64_t first, int64_t size,
                Fetched& fetched, Panel& to) {
  const int64_t whole = size / 32 * 32;
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* const line = q.codes + (row + r) * q.row_bytes;
    auto* words = reinterpret_cast<char*>(to.codes) + 4 * r;
    for (int64_t k = 0; k < whole; k += 32) {
      if (fetched.next != nullptr) {
        _mm_prefetch(fetched.next, _MM_HINT_T1);
        fetched.next += 32 * q.row_bytes / q.columns;
      }
      alignas(32) char codes[32];
      _mm256_store_si256(reinterpret_cast<__m256i*>(codes), panel_codes<kPacking, kBits>(line, first + k));
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i, words += 4 * kPanelRows) std::memcpy(words, codes + 4 * i, 4);
    }
  }
  if (whole < size) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t k = whole; k < (size + 7) / 8 * 8; ++k) {
        const int64_t place = place_of(form, k);
        to.codes[(place / 4 * kPanelRows + r) * 4 + place % 4] = k < size ? code_at(q, row + r, first + k) : 0;
      }
  }
  plain_lines(q, form, row, rows, first, size, 0, to);
}

inline void fill_panel(const Quantized& q, const IntegerForm& form, int64_t row, int64_t rows, int64_t first,
                       int64_t size, Fetched& fetched, Panel& to) {
  switch (q.packing) {
    case Packing::kInt8:
      return fill_codes<Packing::kInt8>(q, form, row, rows, first, size, fetched, to);
    case Packing::kPacked:
      if (q.bits == 4) return fill_codes<Packing::kPacked, 4>(q, form, row, rows, first, size, fetched, to);
      return fill_codes<Packing::kPacked, 8>(q, form, row, rows, first, size, fetched, to);
    case Packing::kMx:
      return fill_codes<Packing::kMx>(q, form, row, rows, first, size, fetched, to);
    case Packing::kMxBlocks:
      return fill_codes<Packing::kMxBlocks>(q, form, row, rows, first, size, fetched, to);
    case Packing::kQ4_0:
      return fill_codes<Packing::kQ4_0>(q, form, row, rows, first, size, fetched, to);
    case Packing::kQ8_0:
      return fill_codes<Packing::kQ8_0>(q, form, row, rows, first, size, fetched, to);
    case Packing::kQ4_K:
      return fill_codes<Packing::kQ4_K>(q, form, row, rows, first, size, fetched, to);
    case Packing::kQ5_K:
      return fill_codes<Packing::kQ5_K>(q, form, row, rows, first, size, fetched, to);
    case Packing::kQ6_K:
      return fill_codes<Packing::kQ6_K>(q, form, row, rows, first, size, fetched, to);
    default:
      plain_panel(q, form, row, rows, first, size, fetched, to);
  }
}

}  // namespace
}  // namespace moelight
