#include "tiles.inl"
#include "tiles/imitation.h"

moelight::Kernel moelight::ffn_imitation(WeightType weight) { return tile_kernel_for<ImitatedTile>(weight); }
