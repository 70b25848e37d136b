// The codebooks of ggml's types of 1 to 3 bits: an index stands for several values at once. The points are those of
// moelight/formats/codebook.py, from the same files, and put together by the compiler, once for all instruction sets.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "numbers.h"

namespace moelight {
namespace codebooks {

// A number of `steps` is the one before and the step; its digits, the first one lowest, are places in `levels`.
template <size_t kWidth, size_t kLevels, size_t kCount>
constexpr std::array<std::array<int8_t, kWidth>, kCount> points(const int8_t (&levels)[kLevels],
                                                                const uint16_t (&steps)[kCount]) {
  std::array<std::array<int8_t, kWidth>, kCount> result = {};
  size_t number = 0;
  for (size_t i = 0; i < kCount; ++i) {
    number += steps[i];
    size_t rest = number;
    for (size_t digit = 0; digit < kWidth; ++digit, rest /= kLevels) result[i][digit] = levels[rest % kLevels];
  }
  return result;
}

inline constexpr uint16_t kIq1Steps[] = {
#include "../../moelight/formats/codebooks/iq1.inc"
};
inline constexpr auto kIq1 = points<8>({-1, 0, 1}, kIq1Steps);
static_assert(kIq1.size() == 2048);

inline constexpr uint16_t kIq2XxsSteps[] = {
#include "../../moelight/formats/codebooks/iq2_xxs.inc"
};
inline constexpr auto kIq2Xxs = points<8>({8, 25, 43}, kIq2XxsSteps);
static_assert(kIq2Xxs.size() == 256);

inline constexpr uint16_t kIq2XsSteps[] = {
#include "../../moelight/formats/codebooks/iq2_xs.inc"
};
inline constexpr auto kIq2Xs = points<8>({8, 25, 43}, kIq2XsSteps);
static_assert(kIq2Xs.size() == 512);

inline constexpr uint16_t kIq2SSteps[] = {
#include "../../moelight/formats/codebooks/iq2_s.inc"
};
inline constexpr auto kIq2S = points<8>({8, 25, 43}, kIq2SSteps);
static_assert(kIq2S.size() == 1024);

inline constexpr uint16_t kIq3XxsSteps[] = {
#include "../../moelight/formats/codebooks/iq3_xxs.inc"
};
inline constexpr auto kIq3Xxs = points<4>({4, 12, 20, 28, 36, 44, 52, 62}, kIq3XxsSteps);
static_assert(kIq3Xxs.size() == 256);

inline constexpr uint16_t kIq3SSteps[] = {
#include "../../moelight/formats/codebooks/iq3_s.inc"
};
inline constexpr auto kIq3S = points<4>({1, 3, 5, 7, 9, 11, 13, 15}, kIq3SSteps);
static_assert(kIq3S.size() == 512);

}  // namespace codebooks

namespace {

// Eight signs, of which an even number is negative, from the lowest seven bits.
constexpr uint32_t even_signs(uint32_t bits) {
  const uint32_t seven = bits & 127;
  return seven | static_cast<uint32_t>(__builtin_parity(seven)) << 7;
}

// Eight values of a block: what a point has and `shift`, negative where a bit of `signs` is set.
struct Eight {
  std::array<int8_t, 8> point;
  uint32_t signs;
  float shift = 0.0f;
};

inline void values_of(const Eight& from, float step, float* to) {
  for (size_t i = 0; i < 8; ++i) {
    const float value = step * (static_cast<float>(from.point[i]) + from.shift);
    to[i] = from_bits(to_bits(value) ^ (from.signs << (31 - i) & 0x80000000));
  }
}

// Two points of four.
inline std::array<int8_t, 8> joined(const std::array<int8_t, 4>& first, const std::array<int8_t, 4>& second) {
  std::array<int8_t, 8> joined;
  std::memcpy(joined.data(), first.data(), 4), std::memcpy(joined.data() + 4, second.data(), 4);
  return joined;
}

}  // namespace
}  // namespace moelight
