#include "near.inl"

namespace moelight {
namespace {

template <class P>
Kernel kernel_of(WeightType weight, void (*floats)(const Product&, void*, float*),
                 Unpacking (*unpacking)(const Quantized&)) {
  return {.step = kPairStep,
          .element_bytes = 2,
          .gap_bytes = 0,
          .token_step = 1,
          .in_place = true,
          .scratch_bytes = std::max(kRows * kBufferRow<P>, kStreamBytes<P>),
          .multiply = weight == WeightType::kQuantized ? multiply_quantized<P> : floats,
          .multiply_transposed = nullptr,
          .turn = nullptr,
          .prepare = prepare,
          .store = store<Avx512, Bf16>,
          .activate = activate<Avx512, Bf16>,
          .unpacking = unpacking};
}

}  // namespace

Kernel ffn_avx512_dots(WeightType weight) { return kernel_of<Pairs>(weight, multiply_pairs, unpacking_pairs); }
Kernel ffn_avx512_halves(WeightType weight) { return kernel_of<Halves>(weight, multiply_halves, unpacking_halves); }

}  // namespace moelight
