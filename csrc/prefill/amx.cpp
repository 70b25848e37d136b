#include "tiles/amx.h"

#include "kernel.inl"
#include "tiles.h"

const moelight::PrefillKernels& moelight::prefill_amx() { return kernels<PrefillAvx512, Tiles<AmxTile>>(); }
