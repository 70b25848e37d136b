#include "tiles/amx.h"

#include "tiles.h"

const moelight::PrefillKernels& moelight::prefill_amx() { return tile_kernels<AmxTile>(); }
