#include <immintrin.h>

#include "peaks.h"

namespace moelight {
namespace {

constexpr int64_t kPerRound = 16;
constexpr int kChains = 6;
constexpr double kFlop = 16 * 16 * 32 * 2;

template <int kTile>
void zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

template <int kSum>
void multiply_add() {
  asm volatile("tdpbf16ps %%tmm7, %%tmm6, %%tmm%c0" ::"i"(kSum));
}

// Six sums; the operands stay in the other two tiles.
void run(int64_t rounds) {
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  const Config config;
  asm volatile("" ::"r"(&config) : "memory");  // gcc 12 takes the intrinsic to read the first eight bytes only
  _tile_loadconfig(&config);
  for (int64_t i = 0; i < rounds * kPerRound; ++i) {
    multiply_add<0>(), multiply_add<1>(), multiply_add<2>();
    multiply_add<3>(), multiply_add<4>(), multiply_add<5>();
  }
  _tile_release();
}

}  // namespace

ProductUnit product_amx() { return {run, static_cast<double>(kPerRound) * kChains * kFlop}; }

}  // namespace moelight
