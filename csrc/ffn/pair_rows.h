// Rows and tokens of bf16 as lines of Lanes P (pairs.h). For AVX-512 with BF16; internal linkage.
#pragma once

#include <immintrin.h>

#include "ffn.h"
#include "pairs.h"

namespace moelight {
namespace {

constexpr int64_t kPairStep = 32;  // numbers of a line

inline __m512i load_words(const void* p, int64_t count) {
  const __mmask32 some = count >= kPairStep ? ~__mmask32{0} : (__mmask32{1} << count) - 1;
  return _mm512_maskz_loadu_epi16(some, p);
}

// A row in one block of K, zeros up to the step; touches what lies `ahead` meanwhile.
template <class P>
void convert_row(const Product& p, int64_t row, int64_t first, int64_t size, const char* ahead, char* to) {
  const char* from = p.weight + row * p.row_bytes + 2 * first;
  for (int64_t k = 0; k < size; k += kPairStep, from += 64, to += P::kLineBytes, ahead += 64) {
    _mm_prefetch(ahead, _MM_HINT_T0);
    P::store(to, P::of(load_words(from, size - k)));
  }
}

// One token, zeros up to the step.
inline void arrange(const Bf16* x, int64_t depth, char* to) {
  for (int64_t k = 0; k < depth; k += kPairStep) _mm512_storeu_si512(to + 2 * k, load_words(x + k, depth - k));
}

}  // namespace
}  // namespace moelight
