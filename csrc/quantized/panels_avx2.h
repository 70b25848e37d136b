// Fills the panels of integers.h for AVX2, thirty-two columns of a row at once. Internal linkage.
#pragma once

#include "codes_avx2.h"
#include "integers.h"

namespace moelight {
namespace {

// Unsigned codes of columns [k, k + 32) as a panel takes them.
template <class Format>
inline __m256i panel_codes(const uint8_t* line, int64_t k) {
  __m256i codes = codes_of(Format(), line, k);
  if constexpr (kSignedBytes<Format>) codes = _mm256_xor_si256(codes, _mm256_set1_epi8(static_cast<char>(0x80)));
  if constexpr (kE2m1<Format>)
    codes = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(half_bytes_at(kE2m1Codes)), codes);
  if constexpr (Format::kPairs)
    codes = _mm256_shuffle_epi8(codes, _mm256_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15, 0, 2, 4,
                                                        6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
  return codes;
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
      auto* words = reinterpret_cast<char*>(to.codes) + 4 * r;
      for (int64_t k = 0; k < aligned; k += 32) {
        if (fetched.next != nullptr) {
          _mm_prefetch(fetched.next, _MM_HINT_T1);
          fetched.next += 32 * q.row_bytes / q.columns;
        }
        alignas(32) char codes[32];
        _mm256_store_si256(reinterpret_cast<__m256i*>(codes), panel_codes<Format>(line, first + k));
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i, words += 4 * kPanelRows) std::memcpy(words, codes + 4 * i, 4);
      }
    }
    for (int64_t r = 0; aligned < size && r < rows; ++r)
      plain_codes<Format>(q, form, row + r, first, aligned, size, r, to);
    plain_lines<Format>(q, form, row, rows, first, size, 0, to);
  }
};

}  // namespace
}  // namespace moelight
