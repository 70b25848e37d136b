#include "tiles/amx.h"

#include "tiles.h"

const moelight::MlaKernels& moelight::mla_amx() { return tile_kernels<AmxTile>(); }
