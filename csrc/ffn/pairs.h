// Lanes over pairs of bf16, and the order of their sums. For AVX-512 with BF16; internal linkage.
//
// K is cut into blocks of equal size, by K alone; within a block lane i sums products, step by step, and the lanes are
// added in a fixed tree; the blocks are added in order, in float32.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

namespace moelight {
namespace {

constexpr int64_t kMostBlock = 1024;  // elements of a block of K

inline int64_t rounded(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Blocks of K, all but the last of `size` elements.
struct DepthBlocks {
  int64_t count, size;
  explicit DepthBlocks(int64_t depth)
      : count((depth + kMostBlock - 1) / kMostBlock),
        size(rounded(count == 1 ? depth : (depth + count - 1) / count, 64)) {}
};

// While it lives, results that are subnormal are zero, as those of vdpbf16ps are, and operands too where it says so.
class Subnormals {
 public:
  explicit Subnormals(bool operands) : before_(_mm_getcsr()) { _mm_setcsr(before_ | (operands ? 0x8040 : 0x8000)); }
  ~Subnormals() { _mm_setcsr(before_); }
  Subnormals(const Subnormals&) = delete;
  Subnormals& operator=(const Subnormals&) = delete;

 private:
  unsigned before_;
};

// A line is thirty-two numbers. Pairs multiply them by vdpbf16ps.
struct Pairs {
  using Line = __m512i;
  static constexpr int64_t kLineBytes = 64;
  static Line of(__m512i pairs) { return pairs; }
  static Line token(__m512i pairs) { return pairs; }
  static Line load(const char* p) { return _mm512_loadu_si512(p); }
  static void store(char* p, Line line) { _mm512_storeu_si512(p, line); }
  static __m512 madd(__m512 sum, Line weight, Line x) { return _mm512_dpbf16_ps(sum, (__m512bh)weight, (__m512bh)x); }
};

struct HalfLine {
  __m512 even, odd;
};

// Halves are the even and the odd numbers as float32, for processors whose vdpbf16ps takes longer than two products of
// those. Under Subnormals(true) sums are those of Pairs to the bit: vdpbf16ps adds the odd product first, each with one
// rounding, and takes what is subnormal as zero.
struct Halves {
  using Line = HalfLine;
  static constexpr int64_t kLineBytes = 128;
  static Line of(__m512i pairs) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)), _mm512_castsi512_ps(_mm512_and_si512(pairs, upper))};
  }
  static Line load(const char* p) { return {_mm512_loadu_ps(p), _mm512_loadu_ps(p + 64)}; }
  // Under Subnormals: none is left.
  static Line token(__m512i pairs) {
    const Line line = of(pairs);
    const __m512 one = _mm512_set1_ps(1.0f);
    return {_mm512_mul_ps(line.even, one), _mm512_mul_ps(line.odd, one)};
  }
  static void store(char* p, Line line) { _mm512_storeu_ps(p, line.even), _mm512_storeu_ps(p + 64, line.odd); }
  static __m512 madd(__m512 sum, Line weight, Line x) {
    return _mm512_fmadd_ps(weight.even, x.even, _mm512_fmadd_ps(weight.odd, x.odd, sum));
  }
};

// The eight sums across the lanes of eight vectors, always in the same tree; as part of its caller where gcc would have
// the vectors pass through memory.
__attribute__((always_inline)) inline __m256 across_inline(const __m512 (&v)[8]) {
  __m512 two[4], four[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    two[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)
    four[i] = _mm512_add_ps(_mm512_shuffle_ps(two[2 * i], two[2 * i + 1], 0x44),
                            _mm512_shuffle_ps(two[2 * i], two[2 * i + 1], 0xee));
  const __m512 eight =
      _mm512_add_ps(_mm512_shuffle_f32x4(four[0], four[1], 0x88), _mm512_shuffle_f32x4(four[0], four[1], 0xdd));
  const __m512 swapped = _mm512_shuffle_f32x4(eight, eight, 0xb1);
  const __m512 sums = _mm512_add_ps(eight, swapped);
  return _mm256_insertf128_ps(_mm512_castps512_ps256(sums), _mm512_extractf32x4_ps(sums, 2), 1);
}

inline __m256 across(const __m512 (&v)[8]) { return across_inline(v); }

}  // namespace
}  // namespace moelight
