#include "tiles/emulated.h"

#include "kernel.inl"
#include "tiles.h"

const moelight::PrefillKernels& moelight::prefill_emulated() { return kernels<PrefillAvx512, Tiles<EmulatedTile>>(); }
