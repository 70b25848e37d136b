#include "stream.inl"

namespace moelight {
namespace {

template <class Stored>
Kernel dots_kernel(void (*product)(const Product&, void*, float*)) {
  return {.step = Stored::kStep,
          .element_bytes = 2,
          .head_bytes = Stored::kHead,
          .token_step = 1,
          .in_place = Stored::kInPlace,
          .scratch_bytes = std::max(kRows * kBufferRow, kStreamRoom),
          .multiply = product,
          .multiply_transposed = nullptr,
          .turn = nullptr,
          .prepare = prepare<Stored>,
          .store = store<Avx512, Bf16>,
          .activate = activate<Avx512, Bf16>};
}

}  // namespace

Kernel ffn_avx512_dots(WeightType weight) {
  switch (weight) {
    case WeightType::kInt8:
      return dots_kernel<StoredInt8>(multiply_few<StoredInt8>);
    case WeightType::kInt4:
      return dots_kernel<StoredInt4>(multiply<StoredInt4>);
    case WeightType::kQuantized: {
      Kernel kernel = dots_kernel<StoredBf16>(multiply_unpacked);
      kernel.unpack = unpack_avx512_pairs;
      return kernel;
    }
    default:
      return dots_kernel<StoredBf16>(multiply_few<StoredBf16>);
  }
}

}  // namespace moelight
