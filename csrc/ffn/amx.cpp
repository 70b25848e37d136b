#include "tiles/amx.h"
#include "tiles.inl"

moelight::Kernel moelight::ffn_amx(WeightType weight) { return tile_kernel_for<AmxTile>(weight); }
