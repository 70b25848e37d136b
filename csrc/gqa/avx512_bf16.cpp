#include "kernel.inl"
#include "pairs.h"

namespace moelight {
namespace {

template <class Q>
using Int8 = PairProducts<IntPairs, Q>;

}  // namespace

const GqaKernels& gqa_avx512_bf16() { return kernels<LanesAvx512, PairProducts<Bf16Pairs, Bf16>, Int8>(); }

}  // namespace moelight
