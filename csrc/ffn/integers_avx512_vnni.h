// Four products of bytes at a time. Include only from a file compiled for AVX512_VNNI; internal linkage.
#pragma once

#include "integers_avx512.h"

namespace moelight {
namespace {

// In assembly, because gcc 12 keeps sums of the intrinsics in memory.
inline __m512i dot_bytes(__m512i sum, __m512i codes, __m512i values) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "vm"(values));
  return sum;
}
inline __m512i dot_words(__m512i sum, __m512i x, __m512i y) {
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
  return sum;
}

struct VnniIntegers : Avx512Integers {
  static V dot(V sum, V codes, V four) { return dot_bytes(sum, codes, four); }
  static V words(V sum, V x, V y) { return dot_words(sum, x, y); }
};

}  // namespace
}  // namespace moelight
