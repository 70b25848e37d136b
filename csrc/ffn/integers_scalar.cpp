#include "integers.inl"
#include "moelight/simd_scalar.h"

namespace moelight {
namespace {

struct ScalarIntegers {
  using Simd = Scalar;
  using V = int32_t;
  static constexpr int kVectors = 1, kTokens = 1;
  static V zero() { return 0; }
  static V add(V x, V y) { return x + y; }
  static V load(const void* p) { return spread(p); }
  static V spread(const void* p) {
    V word;
    std::memcpy(&word, p, sizeof word);
    return word;
  }
  static V product(V x, V y) { return x * y; }
  static V words(V sum, V x, V y) {
    return sum + static_cast<int16_t>(x) * static_cast<int16_t>(y) + (x >> 16) * (y >> 16);
  }
  static V times(const int32_t* zeros, const void* minus) { return *zeros * spread(minus); }
  static V dot(V sum, V codes, V four) {
    for (int shift = 0; shift < 32; shift += 8)
      sum += static_cast<uint8_t>(codes >> shift) * static_cast<int8_t>(four >> shift);
    return sum;
  }
  static float floats(V sum) { return static_cast<float>(sum); }
  static int32_t round(const float* from, int64_t size, float factor, bool pairs, int8_t* to) {
    return round_plainly(from, size, factor, pairs, to);
  }
  static FillPanel filler(const Quantized& q) { return panel_filler<PlainPanels>(q); }
  static constexpr StoredProducts kStored = nullptr;
  static constexpr int64_t kStoredBytes = 0;
};

}  // namespace

Kernel integers_scalar(DType x) { return integer_kernel_for<ScalarIntegers>(x); }

}  // namespace moelight
