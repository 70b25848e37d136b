#include "tiles/imitation.h"
#include "tiles.inl"

moelight::Kernel moelight::ffn_imitation(WeightType weight) { return tile_kernel_for<ImitatedTile>(weight); }
