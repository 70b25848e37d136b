#include "kernel.inl"
#include "pairs_avx512.h"

// Serves activations in bf16; sums are rounded to the same.
const moelight::Lanes& moelight::ffn_avx512_bf16() {
  using L = PairLanes;
  static const Lanes table = {L::kStep,
                              L::kElement,
                              {nullptr, multiply<L, Bf16>, nullptr, multiply<L, int8_t>, multiply<L, Int4>},
                              {nullptr, widen<L, Bf16>, nullptr},
                              {nullptr, store<L, Bf16>, nullptr},
                              {nullptr, activate<L, Bf16>, nullptr}};
  return table;
}
