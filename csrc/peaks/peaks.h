// The most a processor can do: how fast it reads memory, and how fast it multiplies from registers. What kernels are
// held against; nothing else calls them.
#pragma once

#include <cstdint>

namespace moelight {

// Sums of products, two flop each: float32 by float32, pairs of bfloat16 into float32, or four of int8 into int32.
enum class ProductType : int { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2 };

// Reads every byte once, as fast as is known here, with `threads` threads. The result depends on all of them.
uint64_t read_peak(const char* bytes, int64_t count, int threads);

// Multiplies in registers alone for a while: `rounds` rounds on each of `threads` threads, with the instruction set in
// force; bfloat16 in tiles or pairs, and int8 in tiles or four at a time, where the processor has them, else in
// float32. Returns the flop done.
double product_peak(ProductType product, int64_t rounds, int threads);

// One instruction set's unit: a round is kChains x kPerRound products that do not wait for each other.
struct ProductUnit {
  void (*run)(int64_t rounds);
  double flop_per_round;
};

ProductUnit product_scalar();
ProductUnit product_avx2();
ProductUnit product_avx512();
ProductUnit product_avx512_bf16();
ProductUnit product_amx();
ProductUnit product_amx_int8();
ProductUnit product_avx_vnni();
ProductUnit product_avx512_vnni();
ProductUnit product_neon();
ProductUnit product_neon_dots();

}  // namespace moelight
