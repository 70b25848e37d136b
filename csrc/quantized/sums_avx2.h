// Quantised rows times one float32 token, as they are unpacked, for AVX2 (ffn/kernel.inl). Internal linkage.
#pragma once

#include "floats_avx2.h"

namespace moelight {
namespace {

constexpr int64_t kSummedRows = 4, kSummedColumns = 1024;

// Eight numbers of thirty-two codes; `times` and `less` are those of the sixteen that they are among.
template <class Format, int kPart>
inline __attribute__((always_inline)) __m256 eight_of(__m256i codes, __m256 times, const float* less) {
  const __m128i half = kPart < 2 ? _mm256_castsi256_si128(codes) : _mm256_extracti128_si256(codes, 1);
  return number_of<Format>(code_numbers<Format>(kPart % 2 == 0 ? half : _mm_unpackhi_epi64(half, half)), times, less);
}
template <class Format>
inline __m256i float_codes(const uint8_t* line, int64_t k) {
  return kSixteen<Format> != nullptr ? codes_of(Format(), line, k) : number_codes<Format>(line, k);
}

// A row whose numbers are asked for by thirty-two columns, of those that were entered.
template <class Format>
class FloatRow {
 public:
  FloatRow(const Quantized& q, int64_t row) : q_(q), row_(row), line_(q.codes + row * q.row_bytes) {}

  void load_scales(int64_t first, int64_t size, int64_t group) {
    base_ = first / 256 * 256;
    affines_of<Format>(q_, row_, first, size, group, affines_);
  }

  // Columns [k, k + 32), of which columns [8 i, 8 i + 8) are part<i>().
  struct Columns {
    const float *times, *less;
    __m256i codes;

    template <int kPart>
    inline __attribute__((always_inline)) __m256 part() const {
      return eight_of<Format, kPart>(codes, _mm256_broadcast_ss(times + kPart / 2), less + kPart / 2);
    }
  };
  inline __attribute__((always_inline)) Columns columns(int64_t k) const {
    const auto i = static_cast<uint64_t>(k - base_) / 16;
    return {affines_.times + i, affines_.less + i, float_codes<Format>(line_, k)};
  }

 private:
  const Quantized& q_;
  const int64_t row_;
  const uint8_t* const line_;
  int64_t base_ = 0;
  Affines affines_;
};

// The same of blocks of thirty-two columns, whose scales are read where the codes are.
template <class Format>
  requires(kInBlocks<Format> && Format::kTraits.block == 32)
class FloatRow<Format> {
 public:
  FloatRow(const Quantized& q, int64_t row) : line_(q.codes + row * q.row_bytes) {}

  void load_scales(int64_t, int64_t, int64_t) {}

  struct Columns {
    __m256 times;
    float less;
    __m256i codes;

    template <int kPart>
    inline __attribute__((always_inline)) __m256 part() const {
      return eight_of<Format, kPart>(codes, times, &less);
    }
  };
  inline __attribute__((always_inline)) Columns columns(int64_t k) const {
    const Affine by = affine_in(Format(), line_ + k / 32 * Format::kTraits.block_bytes);
    return {_mm256_set1_ps(by.times), by.less, float_codes<Format>(line_, k)};
  }

 private:
  const uint8_t* const line_;
};

// sums[r] += x . row r, of at most kSummedRows rows, in the order of ffn/kernel.inl.
template <class Format>
void sum_float_rows(const Quantized& q, int64_t row, int64_t rows, const char* x, int64_t lead, int64_t, float* sums,
                    int64_t) {
  const auto at = [&](int64_t r) { return FloatRow<Format>(q, row + std::min(r, rows - 1)); };
  FloatRow<Format> stored[kSummedRows] = {at(0), at(1), at(2), at(3)};
  for (int64_t block = 0; block < q.columns; block += kSummedColumns) {
    __m256 sum[kSummedRows] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    const int64_t end = std::min(block + kSummedColumns, q.columns);
    for (int64_t first = block; first < end; first += kAffineColumns) {
      const int64_t size = std::min(kAffineColumns, end - first), group = affine_group<Format>(q, first);
      for (int64_t r = 0; r < kSummedRows; ++r) {
        if (r < rows) fetch_part<Format>(q.codes + (row + r) * q.row_bytes, first, size, lead);
        stored[r].load_scales(first, size, group);
      }
      for (int64_t k = first; k < first + size; k += 32) {
        const auto* const token = reinterpret_cast<const float*>(x) + k;
        typename FloatRow<Format>::Columns columns[kSummedRows];
#pragma GCC unroll 4
        for (int r = 0; r < kSummedRows; ++r) columns[r] = stored[r].columns(k);
        const auto add = [&](auto part) __attribute__((always_inline)) {  // rows in turn, whose sums do not wait
          const __m256 eight = _mm256_loadu_ps(token + 8 * part);
#pragma GCC unroll 4
          for (int r = 0; r < kSummedRows; ++r)
            sum[r] = _mm256_fmadd_ps(columns[r].template part<part>(), eight, sum[r]);
        };
        add(std::integral_constant<int, 0>()), add(std::integral_constant<int, 1>());
        add(std::integral_constant<int, 2>()), add(std::integral_constant<int, 3>());
      }
    }
    float four[kSummedRows];
    Avx2::sum4(sum[0], sum[1], sum[2], sum[3], four);
    for (int64_t r = 0; r < rows; ++r) sums[r] += four[r];
  }
}

// For matrices like one; null where none serves.
inline SumRows sum_floats_of(const Quantized& like) {
  const bool even = like.groups == 1 || like.group % kUnpackStep == 0;
  return with_format(like, [&](auto format) -> SumRows {
    using Format = decltype(format);
    if constexpr (kHasCodes<Format>)
      if (like.columns % 32 == 0 && (kInBlocks<Format> || kBySixteen<Format> || even)) return sum_float_rows<Format>;
    return nullptr;
  });
}

}  // namespace
}  // namespace moelight
