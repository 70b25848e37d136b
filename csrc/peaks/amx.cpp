#include "tiles/amx.h"

#include "peaks.h"

namespace moelight {
namespace {

constexpr int64_t kPerRound = 16;
constexpr int kChains = 6;
constexpr double kBfloat16Flop = 16 * 16 * 32 * 2, kInt8Flop = 2 * kBfloat16Flop;

struct Int8Tile : AmxTile {
  template <int kSum, int kLeft, int kRight>
  static void multiply_add() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight));
  }
};

// Six sums; the operands stay in the other two tiles.
template <class T>
void run(int64_t rounds) {
  T::configure();
  for (int64_t i = 0; i < rounds * kPerRound; ++i) {
    T::template multiply_add<0, 6, 7>(), T::template multiply_add<1, 6, 7>(), T::template multiply_add<2, 6, 7>();
    T::template multiply_add<3, 6, 7>(), T::template multiply_add<4, 6, 7>(), T::template multiply_add<5, 6, 7>();
  }
  T::leave();
}

}  // namespace

ProductUnit product_amx() { return {run<AmxTile>, kPerRound * kChains * kBfloat16Flop}; }
ProductUnit product_amx_int8() { return {run<Int8Tile>, kPerRound * kChains * kInt8Flop}; }

}  // namespace moelight
