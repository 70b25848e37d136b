#include "near.inl"

namespace moelight {
namespace {

template <class Stored, class P = typename Stored::Lanes>
Kernel dots_kernel(void (*product)(const Product&, void*, float*)) {
  return {.step = Stored::kStep,
          .element_bytes = 2,
          .head_bytes = Stored::kHead,
          .token_step = 1,
          .in_place = Stored::kInPlace,
          .scratch_bytes = std::max(kRows * kBufferRow<P>, kStreamRoom<P>),
          .multiply = product,
          .multiply_transposed = nullptr,
          .turn = nullptr,
          .prepare = prepare<Stored>,
          .store = store<Avx512, Bf16>,
          .activate = activate<Avx512, Bf16>};
}

template <class P>
Kernel kernel_of(WeightType weight, void (*floats)(const Product&, void*, float*),
                 Unpacking (*unpacking)(const Quantized&)) {
  switch (weight) {
    case WeightType::kInt8:
      return dots_kernel<StoredInt8>(multiply_few<StoredInt8>);
    case WeightType::kInt4:
      return dots_kernel<StoredInt4>(multiply<StoredInt4>);
    case WeightType::kQuantized: {
      Kernel kernel = dots_kernel<StoredBf16, P>(multiply_quantized<P>);
      kernel.unpacking = unpacking;
      return kernel;
    }
    default:
      return dots_kernel<StoredBf16, P>(floats);
  }
}

}  // namespace

Kernel ffn_avx512_dots(WeightType weight) { return kernel_of<Pairs>(weight, multiply_pairs, unpacking_pairs); }
Kernel ffn_avx512_halves(WeightType weight) { return kernel_of<Halves>(weight, multiply_halves, unpacking_halves); }

}  // namespace moelight
