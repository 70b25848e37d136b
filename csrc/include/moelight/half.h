// Sixteen-bit floats as they are stored, and their one-by-one conversion. Internal linkage throughout: every
// instruction set compiles its own copy, so that none can leak into a file built for a smaller processor.
#pragma once

#include <cstdint>
#include <cstring>

namespace moelight {

enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
constexpr int kDTypes = 3;

constexpr int64_t dtype_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

namespace {

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float to_float(float x) { return x; }
inline float to_float(Bf16 x) { return from_bits(static_cast<uint32_t>(x.bits) << 16); }

inline float to_float(Fp16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  const uint32_t magnitude = x.bits & 0x7fff;
  if (magnitude >= 0x7c00) return from_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  // As float bits the magnitude stands 2^112 too low, subnormals included.
  return from_bits(sign | to_bits(from_bits(magnitude << 13) * from_bits(0x77800000)));
}

inline void from_float(float x, float& out) { out = x; }

inline void from_float(float x, Bf16& out) {
  const uint32_t bits = to_bits(x);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  out.bits = static_cast<uint16_t>(nan ? (bits >> 16) | 0x40 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline void from_float(float x, Fp16& out) {
  const uint32_t bits = to_bits(x);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00;
  } else if (magnitude >= 0x477ff000) {
    half = 0x7c00;
  } else if (magnitude < 0x38800000) {
    // Subnormal: adding 0.5 lets the floating-point unit round to a multiple of 2^-24.
    half = to_bits(from_bits(magnitude) + 0.5f) - to_bits(0.5f);
  } else {
    half = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  }
  out.bits = static_cast<uint16_t>(sign | half);
}

}  // namespace
}  // namespace moelight
