#include "tiles.inl"
#include "tiles/amx.h"

moelight::Kernel moelight::ffn_amx(WeightType weight) { return tile_kernel_for<AmxTile>(weight); }
