#include "tiles/emulated.h"

#include "tiles.h"

const moelight::MlaKernels& moelight::mla_emulated() { return tile_kernels<EmulatedTile>(); }
