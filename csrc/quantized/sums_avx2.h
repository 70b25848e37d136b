// Rows of ggml's blocks times one float32 token, as they are unpacked, for AVX2 (ffn/kernel.inl). Internal linkage.
//
// Numbers are those of floats_avx2.h, to the bit: a scale of float16, or one times a step of at most eight bits, times
// a code needs no rounding, so what is added to it may be added in the same instruction.
#pragma once

#include "affine_avx2.h"

namespace moelight {
namespace {

constexpr int64_t kSummedRows = 4, kSummedColumns = 1024;

// Thirty-two columns of a row: columns [8 i, 8 i + 8) are number(i). kSigned: codes are, and nothing is added.
template <bool kSigned>
struct SummedCodes {
  __m128i halves[2];
  __m256 times[2], plus;

  SummedCodes(__m256i codes, float first, float second, float plus)
      : halves{_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1)},
        times{_mm256_set1_ps(first), _mm256_set1_ps(second)},
        plus(_mm256_set1_ps(plus)) {}
  __m256 number(int i) const {
    const __m128i bytes = i % 2 == 0 ? halves[i / 2] : _mm_unpackhi_epi64(halves[i / 2], halves[i / 2]);
    if constexpr (kSigned) return _mm256_mul_ps(times[i / 2], _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)));
    return _mm256_fmadd_ps(times[i / 2], _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)), plus);
  }
};

// A row from some block on; at(k) is what lies k columns further, read in order.
template <class Format>
struct SummedRow {
  const uint8_t* block;
  explicit SummedRow(const uint8_t* block) : block(block) {}

  auto at(int64_t k) {
    const uint8_t* const p = block + k / 32 * Format::kTraits.block_bytes;
    const Affine by = affine_in(Format(), p);
    const __m256i codes = codes_of(Format(), p, 0);
    if constexpr (Format::kLeast) {
      return SummedCodes<false>(codes, by.times, by.times, -by.less);
    } else {
      const __m256i less = _mm256_set1_epi8(static_cast<char>(by.less));
      return SummedCodes<true>(_mm256_sub_epi8(codes, less), by.times, by.times, 0.0f);
    }
  }
};

template <class Format>
  requires kParted<Format>
struct SummedRow<Format> {
  const uint8_t* block;
  Parts parts;
  explicit SummedRow(const uint8_t* block) : block(block) {}

  auto at(int64_t k) {
    const uint8_t* const p = block + k / 256 * Format::kTraits.block_bytes;
    const int64_t i = k % 256;
    if (i == 0) parts_of<Format>(p, parts);
    const __m256i codes = codes_of(Format(), p, i);
    if constexpr (Format::kLeast) {
      return SummedCodes<false>(codes, parts.times[i / 16], parts.times[i / 16], -parts.less[i / 32]);
    } else {
      return SummedCodes<true>(_mm256_sub_epi8(codes, _mm256_set1_epi8(32)), parts.times[i / 16],
                               parts.times[i / 16 + 1], 0.0f);
    }
  }
};

// sums[r] += x . row r, of at most kSummedRows rows, in the order of ffn/kernel.inl.
template <class Format>
void sum_float_rows(const Quantized& q, int64_t row, int64_t rows, const char* x, int64_t lead, int64_t, float* sums,
                    int64_t) {
  const int64_t step = kSummedRows * 32 * q.row_bytes / q.columns;
  const char *ahead = reinterpret_cast<const char*>(q.codes) + row * q.row_bytes + lead, *asked = ahead;
  for (int64_t first = 0; first < q.columns; first += kSummedColumns) {
    const int64_t size = std::min(kSummedColumns, q.columns - first);
    const auto from = [&](int64_t r) { return Format::block_of(q, row + std::min(r, rows - 1), first); };
    SummedRow<Format> stored[kSummedRows] = {SummedRow<Format>(from(0)), SummedRow<Format>(from(1)),
                                             SummedRow<Format>(from(2)), SummedRow<Format>(from(3))};
    __m256 sum[kSummedRows];
#pragma GCC unroll 4
    for (auto& lanes : sum) lanes = _mm256_setzero_ps();
    for (int64_t k = 0; k < size; k += 32) {
      for (ahead += step; asked < ahead; asked += 64) _mm_prefetch(asked, _MM_HINT_T1);
      const auto* const token = reinterpret_cast<const float*>(x) + first + k;
#pragma GCC unroll 4
      for (int r = 0; r < kSummedRows; ++r) {
        const auto codes = stored[r].at(k);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sum[r] = _mm256_fmadd_ps(codes.number(i), _mm256_loadu_ps(token + 8 * i), sum[r]);
      }
    }
    float four[kSummedRows];
    Avx2::sum4(sum[0], sum[1], sum[2], sum[3], four);
    for (int64_t r = 0; r < rows; ++r) sums[r] += four[r];
  }
}

// For matrices like one; null where none serves.
inline SumRows sum_floats_of(const Quantized& like) {
  return with_format(like, [](auto format) -> SumRows {
    using Format = decltype(format);
    constexpr bool kServed = kParted<Format> || requires(const uint8_t* block) { affine_in(Format(), block); };
    if constexpr (kServed) return sum_float_rows<Format>;
    return nullptr;
  });
}

}  // namespace
}  // namespace moelight
