#include "tiles.inl"
#include "tiles/emulated.h"

moelight::Kernel moelight::ffn_emulated(WeightType weight) { return tile_kernel_for<EmulatedTile>(weight); }
