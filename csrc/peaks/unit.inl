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
#pragma GCC unroll 32
  for (int c = 0; c < Unit::kChains; ++c) sums[c] = Unit::zero();
  for (int64_t i = 0; i < rounds * kPerRound; ++i) {
#pragma GCC unroll 32
    for (int c = 0; c < Unit::kChains; ++c) Unit::multiply_add(sums[c]);
  }
#pragma GCC unroll 32
  for (int c = 1; c < Unit::kChains; ++c) sums[0] = Unit::add(sums[0], sums[c]);
  const typename Unit::V all = sums[0];
  asm volatile("" ::"m"(all));
}

template <class Unit>
constexpr ProductUnit unit() {
  return {run_products<Unit>, static_cast<double>(kPerRound) * Unit::kChains * Unit::kFlop};
}

}  // namespace
}  // namespace moelight
