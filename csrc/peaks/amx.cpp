#include "tiles/amx.h"

#include "peaks.h"

namespace moelight {
namespace {

constexpr int64_t kPerRound = 16;
constexpr int kChains = 6;
constexpr double kFlop = 16 * 16 * 32 * 2;

// Six sums; the operands stay in the other two tiles.
void run(int64_t rounds) {
  using T = AmxTile;
  T::enter();
  for (int64_t i = 0; i < rounds * kPerRound; ++i) {
    T::multiply_add<0, 6, 7>(), T::multiply_add<1, 6, 7>(), T::multiply_add<2, 6, 7>();
    T::multiply_add<3, 6, 7>(), T::multiply_add<4, 6, 7>(), T::multiply_add<5, 6, 7>();
  }
  T::leave();
}

}  // namespace

ProductUnit product_amx() { return {run, static_cast<double>(kPerRound) * kChains * kFlop}; }

}  // namespace moelight
