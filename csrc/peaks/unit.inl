// The loop that every vector unit runs. Compiled once for each instruction set.
#pragma once

#include "peaks.h"

namespace moelight {
namespace {

constexpr int64_t kPerRound = 64;

// Unit: V, zero(), add(V, V), multiply_add(V& sum), kChains sums that fit the registers and hide the latency, kFlop of
// one multiply_add.
template <class Unit>
void run_products(int64_t rounds) {
  typename Unit::V sums[Unit::kChains];
  for (auto& sum : sums) sum = Unit::zero();
  for (int64_t i = 0; i < rounds * kPerRound; ++i) {
#pragma GCC unroll 32
    for (auto& sum : sums) Unit::multiply_add(sum);
  }
  for (int i = 1; i < Unit::kChains; ++i) sums[0] = Unit::add(sums[0], sums[i]);
  asm volatile("" ::"m"(sums[0]));
}

template <class Unit>
constexpr ProductUnit unit() {
  return {run_products<Unit>, static_cast<double>(kPerRound) * Unit::kChains * Unit::kFlop};
}

}  // namespace
}  // namespace moelight
