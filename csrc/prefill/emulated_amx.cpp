#include "tiles/emulated.h"

#include "tiles.h"

const moelight::PrefillKernels& moelight::prefill_emulated() { return tile_kernels<EmulatedTile>(); }
