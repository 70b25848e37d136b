// Four products of bytes at a time. Include only from a file compiled for AVX512_VNNI; internal linkage.
#pragma once

#include "integers_avx512.h"

namespace moelight {
namespace {

struct VnniIntegers : Avx512Integers {
  // In assembly, because gcc 12 keeps sums of the intrinsic in memory.
  static V dot(V sum, V codes, V four) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(four));
    return sum;
  }
  static V words(V sum, V x, V y) {
    asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
    return sum;
  }
};

}  // namespace

}  // namespace moelight
