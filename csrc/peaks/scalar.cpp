#include "unit.inl"

namespace moelight {
namespace {

struct ScalarUnit {
  using V = float;
  static constexpr int kChains = 8;
  static constexpr double kFlop = 2;
  static V zero() { return 0.0f; }
  static V add(V x, V y) { return x + y; }
  static void multiply_add(V& sum) {
    sum = sum * 0.5f + 1.0f;
#if defined(__SSE2__)
    asm volatile("" : "+x"(sum));  // so that the loop is neither folded nor made of vectors
#endif
  }
};

}  // namespace

ProductUnit product_scalar() { return unit<ScalarUnit>(); }

}  // namespace moelight
